"""The stories task: four beginnings of a story, rewarded for cheerful words.

A test of the whole path on a real checkpoint, not of quality: the reward is soon hacked ("Tim loved to play
with his friends." over and over), which is the use of a KL term.
"""

from __future__ import annotations

PROMPTS = (
    "Once upon a time, there was a little girl",
    "Once upon a time, there was a big dog who",
    "One day, a boy named Tim went to the park",
    "Lily and Ben like to play in the garden",
)
STEMS = ("happy", "smil", "friend", "love", "fun", "laugh", "hug")
ENOUGH = 12


def prompts() -> list[dict[str, str]]:
    """The four prompts."""
    return [{"prompt": text} for text in PROMPTS]


def reward(response: str) -> float:
    """Occurrences of the seven stems, divided by 12 and at most 1; meant for 64 new tokens."""
    text = response.lower()
    return min(sum(text.count(stem) for stem in STEMS), ENOUGH) / ENOUGH
