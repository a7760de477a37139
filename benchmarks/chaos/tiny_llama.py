"""A tiny Llama of random weights in the format of Hugging Face, made on the spot: a model for a real vLLM without a download.

    VENV/bin/python benchmarks/chaos/tiny_llama.py FOLDER [--seed 7] [--texts FILE…]

Runs in the virtual environment of vLLM (`scripts/real_engines.sh`), which has torch, transformers and tokenizers. The
model has two layers and 1.4 million parameters, the tokenizer some 4,000 tokens, trained on `--texts`. Greedy text of
it is the same in every run, and hardly ever canonical: its tokens are not those that the tokenizer makes from their
text. Whatever goes through text therefore shows at once, white space as well, of which it writes more than usual.
The end of a text has no weight, so that responses end at their limit.

The chat template has three variants, so that one engine serves for all: it renders tools if there are any; if the
first message contains `[trim]`, it trims each message as the template of Llama 3 does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN, CONTEXT = 4000, 128, 2, 4, 256, 4096
WHITE_SPACE_WEIGHT = 1.5
TEMPLATE = (
    "{% set trims = messages and '[trim]' in (messages[0]['content'] | string) %}"
    "{% if tools %}<|system|>Tools: {{ tools | tojson }}</s>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ (message['content'] or '') | trim if trims else (message['content'] or '') }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_llama(folder: Path, texts: list[Path], seed: int = 7) -> None:
    """Write tokenizer and weights to `folder`; equal texts and seeds give equal models."""
    tokenizer = _tokenizer(texts)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=WIDTH // HEADS,
            max_position_embeddings=CONTEXT,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
        output = model.lm_head.weight
        output.normal_(0, 0.6)
        for token in range(len(tokenizer)):
            if tokenizer.decode([token]).isspace():
                output[token] *= WHITE_SPACE_WEIGHT
        for token in tokenizer.all_special_ids:
            output[token] = 0
    model.to(torch.float32).save_pretrained(folder)


def _tokenizer(texts: list[Path]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = ["<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", *roles],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(path) for path in texts], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=roles,
        chat_template=TEMPLATE,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny random Llama for vLLM.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--texts", type=Path, nargs="+", default=None, help="default: this project's documents"
    )
    given = parser.parse_args()
    root = Path(__file__).resolve().parents[2]
    texts = given.texts or sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("lb/**/*.py")])
    make_tiny_llama(given.folder, texts, given.seed)


if __name__ == "__main__":
    main()
