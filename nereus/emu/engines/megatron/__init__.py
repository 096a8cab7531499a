"""Training and scoring by megatron-core. Its import is quiet: `nereus doctor` tells what is absent."""

import warnings

with warnings.catch_warnings(action="ignore"):
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
