"""The sort task: a prompt is some letters, the answer the same letters in order, then <eos>.

The tokenizer and the model's shape are those of the count task. The warm start leaves room to learn: 35
supervised steps, after which most answers have a mistake.

    python benchmarks/learning_sort.py FOLDER     # makes the model, about 3 CPU seconds
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

COUNT = Path(__file__).resolve().parent.parent / "examples" / "count"
sys.path.insert(0, str(COUNT))

from cycle import BOS, EOS, FIRST_LETTER, LETTERS, SEP  # noqa: E402  (beside the count task, not a package)

ALPHABET = LETTERS[:10]
NUM_LETTERS = 5
MAX_NEW_TOKENS = 8
SFT_STEPS = 35
SFT_ROWS = 64
LEARNING_RATE = 2e-3
RECIPE = {"task": "sort", "letters": NUM_LETTERS, "steps": SFT_STEPS, "seed": 2}


def prompts(num_prompts: int = 512, seed: int = 0) -> Iterator[dict[str, str]]:
    """Records {"prompt": letters, "answer": letters in order}."""
    draw = random.Random(seed)
    for _ in range(num_prompts):
        letters = "".join(draw.choice(ALPHABET) for _ in range(NUM_LETTERS))
        yield {"prompt": letters, "answer": "".join(sorted(letters))}


def reward(response_token_ids: Sequence[int], ground_truth: str) -> float:
    """Half for the whole answer with its <eos>, half by the share of letters in their place."""
    body = list(response_token_ids)
    ended = bool(body) and body[-1] == EOS
    if ended:
        body.pop()
    wanted = [FIRST_LETTER + LETTERS.index(letter) for letter in ground_truth]
    hits = sum(a == b for a, b in zip(body, wanted, strict=False))
    return 0.5 * float(ended and body == wanted) + 0.5 * hits / max(len(body), len(wanted))


def make_model(folder: Path) -> None:
    """Write the model after its warm start; a folder that this recipe already made is left alone."""
    import torch
    from make_model import configuration, write_tokenizer
    from transformers import LlamaForCausalLM

    recipe = folder / "recipe.json"
    if recipe.is_file() and json.loads(recipe.read_text()) == RECIPE:
        return
    torch.set_num_threads(1)
    torch.manual_seed(RECIPE["seed"])
    draw = random.Random(RECIPE["seed"])
    model = LlamaForCausalLM(configuration())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(SFT_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20)
        rows = []
        for _ in range(SFT_ROWS):
            letters = [FIRST_LETTER + draw.randrange(len(ALPHABET)) for _ in range(NUM_LETTERS)]
            rows.append([BOS, *letters, SEP, *sorted(letters), EOS])
        ids_bs = torch.tensor(rows)
        labels_bs = ids_bs.clone()
        labels_bs[:, : NUM_LETTERS + 2] = -100
        loss = model(input_ids=ids_bs, labels=labels_bs).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    model.save_pretrained(folder)
    recipe.write_text(json.dumps(RECIPE))
    print(f"wrote {folder}, loss {loss.item():.3f}")


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
