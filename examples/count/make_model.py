"""Make the model of the count task: a Llama of 367,232 parameters that can count a little.

    python examples/count/make_model.py [--output FOLDER] [--seed N]

Writes a Hugging Face folder (config.json, model.safetensors, tokenizer.json and their companions). The warm
start is 150 supervised steps on short correct answers (geometric length, mean 8, at most 24), about 12 CPU
seconds. A folder that this recipe already made is left alone. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from pathlib import Path

import torch
from cycle import BOS, EOS, FIRST_LETTER, LETTERS, PAD, SEP, SPECIAL_TOKENS, VOCAB_SIZE, continuation
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

STEPS = 150
BATCH_ROWS = 64
LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
MEAN_LENGTH = 8
MAX_LENGTH = 24
RECIPE = "recipe.json"  # written last: a folder without it is not complete


def main() -> None:
    """Make the folder, or say that it is there."""
    parser = argparse.ArgumentParser(description="Make the model of the count task.")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).with_name("model"), help="folder to write"
    )
    parser.add_argument("--seed", type=int, default=2, help="seed of weights and warm start")
    arguments = parser.parse_args()
    output: Path = arguments.output
    recipe = {"task": "count", "seed": arguments.seed, "steps": STEPS}
    if (output / RECIPE).is_file() and json.loads((output / RECIPE).read_text()) == recipe:
        print(f"{output} is complete already")
        return
    if output.exists():
        sys.exit(
            f"{output} exists and was not made by this recipe ({recipe}). "
            "Give another --output, or remove the folder."
        )
    unfinished = output.with_name(f"{output.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        write_tokenizer(unfinished)
        warm_start(arguments.seed).save_pretrained(unfinished)
        (unfinished / RECIPE).write_text(json.dumps(recipe))
        unfinished.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # nothing is there after the rename
    print(f"wrote {output}")


def write_tokenizer(folder: Path) -> None:
    """One token a character; <bos> before a text and <sep> after it."""
    reserved = [f"<reserved{i}>" for i in range(VOCAB_SIZE - len(SPECIAL_TOKENS) - len(LETTERS))]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *LETTERS, *reserved])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[PAD]))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <sep>", special_tokens=[("<bos>", BOS), ("<sep>", SEP)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": SPECIAL_TOKENS[BOS],
                "eos_token": SPECIAL_TOKENS[EOS],
                "pad_token": SPECIAL_TOKENS[PAD],
                "clean_up_tokenization_spaces": False,
            },
            indent=1,
        )
    )


def warm_start(seed: int) -> LlamaForCausalLM:
    """The model after the supervised steps; the same for the same seed and torch version."""
    disable_progress_bar()  # of writing one small file
    torch.set_num_threads(1)  # the tensors are too small to share
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = LlamaForCausalLM(configuration())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    columns = (
        TextColumn("warm start"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps, loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("warm start", total=STEPS, loss="-")
        for step in range(STEPS):
            warm, left = min(1.0, (step + 1) / WARMUP_STEPS), 1.0 - step / STEPS
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * warm * (0.1 + 0.9 * left)
            ids_bs, labels_bs = batch(draw)
            loss = model(input_ids=ids_bs, labels=labels_bs).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(bar, advance=1, loss=f"{loss.item():.3f}")
    return model


def configuration() -> LlamaConfig:
    """H 128, 2 layers, 4 heads, 2 KV heads, I 344, 32 tokens, tied: 367,232 parameters."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.6 / 128**0.5,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def batch(draw: random.Random) -> tuple[Tensor, Tensor]:
    """Token ids and labels [b, s] of correct answers of geometric length; labels are -100 beside the
    answer.
    """
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(BATCH_ROWS):
        letter = draw.choice(LETTERS)
        length = 1
        while length < MAX_LENGTH and draw.random() > 1 / MEAN_LENGTH:
            length += 1
        prompt = [BOS, FIRST_LETTER + LETTERS.index(letter), SEP]
        rows.append((prompt, [*continuation(letter, length), EOS]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids_bs = torch.full((BATCH_ROWS, width), PAD)
    labels_bs = torch.full((BATCH_ROWS, width), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids_bs[row, :end] = torch.tensor(prompt + answer)
        labels_bs[row, len(prompt) : end] = torch.tensor(answer)
    return ids_bs, labels_bs


if __name__ == "__main__":
    main()
