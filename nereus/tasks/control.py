"""The job's logical state as the control record that checkpoints and decisions carry."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.emu.checkpoint.control import Control, OptimizerRecord
from nereus.tasks.job import KL_BETA, LOSS_SCALE, Job
from nereus.tasks.rates import learning_rate
from nereus.tasks.resume import MODEL_OF_STAGE


def control_record(job: Job, adam_steps: Mapping[str, int]) -> Control:
    """Step, version, position in the data, the KL term's weight where it adapts, loss scales, and each
    trained model's optimizer, by model-stage in `adam_steps`.
    """
    scales = job.state.loss_scales
    last_step = max(0, job.state.step - 1)
    models = {MODEL_OF_STAGE[stage]: steps for stage, steps in adam_steps.items()}
    rates = {model: learning_rate(job.config, model, last_step) for model in models}
    return Control(
        step=job.state.step,
        policy_version=job.state.policy_version,
        epoch=job.state.cursor.epoch,
        position=job.state.cursor.position,
        seed=job.config.seed,
        config_digest=job.prepared.digest,
        optimizers={
            model: OptimizerRecord(adam_steps=steps, learning_rate=rates[model])
            for model, steps in models.items()
        },
        counters={f"{LOSS_SCALE}{stage}": scale.num_steps for stage, scale in scales.items()},
        scalars=({} if job.state.kl_beta is None else {KL_BETA: job.state.kl_beta})
        | {f"{LOSS_SCALE}{stage}": scale.value for stage, scale in scales.items()},
    )
