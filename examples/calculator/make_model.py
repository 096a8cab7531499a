"""Make the model of the calculator task: a small Llama that copies, and asks the tool now and then.

    python examples/calculator/make_model.py [--output FOLDER]

Writes a Hugging Face folder. The warm start is supervised: in three of four answers the model guesses a sum,
in the others it asks the tool and copies what that says. A folder that is complete is left alone. Nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from sums import BOS, CHARACTERS, EOS, PAD, SPECIAL_TOKENS, VOCAB_SIZE, draw_sum, encode
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 400
BATCH_ROWS = 64
LEARNING_RATE = 3e-3
ASKING = 0.25  # share of the answers that use the tool
SEED = 2
RECIPE = "recipe.json"  # written last: a folder without it is not complete


def main() -> None:
    """Make the folder, or say that it is there."""
    parser = argparse.ArgumentParser(description="Make the model of the calculator task.")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).with_name("model"), help="folder to write"
    )
    output: Path = parser.parse_args().output
    recipe = {"task": "calculator", "seed": SEED, "steps": STEPS}
    if (output / RECIPE).is_file() and json.loads((output / RECIPE).read_text()) == recipe:
        print(f"{output} is complete already")
        return
    output.mkdir(parents=True, exist_ok=True)
    write_tokenizer(output)
    warm_start().save_pretrained(output)
    (output / RECIPE).write_text(json.dumps(recipe))
    print(f"wrote {output}")


def write_tokenizer(folder: Path) -> None:
    """One token a character; <bos> before a prompt."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[PAD]))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    special = {name: SPECIAL_TOKENS[token] for name, token in names.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special, indent=1))


def warm_start() -> LlamaForCausalLM:
    """The model after the supervised steps."""
    torch.set_num_threads(1)  # the tensors are too small to share
    torch.manual_seed(SEED)
    draw = random.Random(SEED)
    model = LlamaForCausalLM(configuration())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20, 0.1 + 1.8 * (1 - step / STEPS))
        ids_bs, labels_bs = batch(draw)
        loss = model(input_ids=ids_bs, labels=labels_bs).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            print(f"warm start: step {step + 1} of {STEPS}, loss {loss.item():.3f}", flush=True)
    return model


def configuration() -> LlamaConfig:
    """H 64, 2 layers, 4 heads, 2 KV heads, I 128, 20 tokens, tied."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def batch(draw: random.Random) -> tuple[Tensor, Tensor]:
    """Rows of prompt and answer; labels are -100 at what the model does not write itself."""
    rows = [example(draw) for _ in range(BATCH_ROWS)]
    width = max(len(ids) for ids, _ in rows)
    ids_bs = torch.full((BATCH_ROWS, width), PAD)
    labels_bs = torch.full((BATCH_ROWS, width), -100)
    for row, (ids, own) in enumerate(rows):
        ids_bs[row, : len(ids)] = torch.tensor(ids)
        labels_bs[row, : len(ids)] = torch.tensor(
            [token if mine else -100 for token, mine in zip(ids, own, strict=True)]
        )
    return ids_bs, labels_bs


def example(draw: random.Random) -> tuple[list[int], list[bool]]:
    """Token ids of a prompt and an answer, and which of them the model writes."""
    question, answer = draw_sum(draw)
    if draw.random() < ASKING:
        written = [(f"({question})", True), (f"{answer}=", False), (answer, True)]
    else:
        written = [(draw_sum(draw)[1], True)]
    ids, own = [BOS, *encode(f"{question}=")], [False] * (len(question) + 2)
    for text, mine in written:
        ids += encode(text)
        own += [mine] * len(text)
    return [*ids, EOS], [*own, True]


if __name__ == "__main__":
    main()
