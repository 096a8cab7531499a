"""`nereus validate`: everything that can be known before an actor starts."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from nereus.cli.arguments import CampaignFile, Overrides
from nereus.config.load import load_campaign

REWARD_TEXT = {
    "python": "the function loads",
    "reasoning_gym": "the task's own score",
    "code": "programs run in the sandbox",
    "judge": "the key is there; the judge was not asked",
    "model": "model",
}


def validate(file: CampaignFile, overrides: Overrides = None) -> None:
    """Check a campaign without starting anything.

    Reads the file, the models' headers, the tokenizer, the prompts, the reward and the tools, and checks that
    they fit together and onto the cluster. Exits with 2 and says what to change when something is wrong.
    """
    config = load_campaign(file, overrides or ())
    console = Console()
    with console.status("reading models, prompts and reward"):
        from nereus.rewards.configured import configured_reward, configured_tools
        from nereus.tasks.prepare import prepare_campaign  # loads torch

        prepared = prepare_campaign(config)
        if config.reward.kind != "model":  # a reward model was read with the others
            with configured_reward(config.reward):
                pass  # its process has loaded the function
        if config.tools is not None:
            with configured_tools(config.tools):
                pass
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, text in prepared.summary():
        table.add_row(label, text)
    table.add_row("reward", REWARD_TEXT[config.reward.kind])
    table.add_row("run folder", str(config.run_folder))
    console.print(table)
    console.print("[green]ok[/green]: this campaign can start")
