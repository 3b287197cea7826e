"""Make the tokenizer goldens: tiny vocabularies in both formats, and ids by transformers.

Usage: ``python make_tokenizer.py MODEL_DIRECTORY`` with transformers installed and the Hugging Face
directory of SmolLM2-135M-Instruct. Writes beside this script, under ``tokenizer/``:

* ``smollm2.json``: texts and chats with the ids and prompts of the real tokenizer;
* ``llama3/``, ``llama2/``, ``gemma/``: a tiny vocabulary of that kind as a model directory, the same as
  GGUF metadata (``gguf.json``) in the way llama.cpp's converter writes it, and ``ids.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers.models import BPE
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import (  # type: ignore[import-not-found, unused-ignore]
    generate_merges,
)

OUT = Path(__file__).parent / "tokenizer"
CORPUS = [
    "The quick brown fox jumps over the lazy dog, then the other dog jumps over the fox.",
    "In the beginning there was nothing, and then there were 12345 things and 678 more things.",
    "def add(a, b):\n    return a + b\n\nfor i in range(100):\n    print(add(i, 1))\n",
    "Don't you think that it's what they'd've done? We'll see; I'm sure you're right.",
    "Ça a été très intéressant, déjà vu à l'été: où est le garçon naïf?",
    "Größe, Straße, Übermut und schöne Grüße aus München.",
    "Быстрая коричневая лиса прыгает через ленивую собаку. Привет, мир!",
    "今天天气很好，我们去公园散步吧。今天的天气真的很好。日本語のテキストもあります。",
    "😀😀😃 👍🏽 👩‍👩‍👧‍👦 🇫🇷 ❤️",
] * 4
TEXTS = [
    "",
    " ",
    "  ",
    "       ",
    "\n",
    "\n\n\n",
    "\t\t x\t\t\t\t\ty\t",
    " \n \n\n  a",
    "Hello world",
    " Hello  World ",
    "Hello, world! It's 2024, don't you THINK?",
    "I'M sure we'Ll see",
    "3",
    "33",
    "3333333 and  42 or 1,234.56",
    "x=1;  y = 22",
    "²³½ Ⅻ ٣٤ 一二三",
    "def f(x):\n    return x**2  # square\n\n\nprint(f(3))\n",
    "for(i=0;i<10;++i){\r\n\ta[i]+=0x1F;\r\n}",
    "naïve café déjà-vu Größe",
    "re\u0301sume\u0301 n\u0303 a\u0300\u0301\u0302",
    "Привет, мир! Как дела?",
    "今天天气很好，我们去公园。日本語テキスト 한국어",
    "مرحبا بالعالم עברית हिन्दी ไทย",
    "😀 👍🏽 👩‍👩‍👧‍👦 🇫🇷🇩🇪 ❤️‍🔥",
    "zero\u200bwidth\u200d\ufeff \u00a0nbsp\u3000wide\u2028sep",
    "\x00\x01\x7f control",
    "\U0001f9d9\U0010ffff\ufffd",
    "https://example.org/a_b?c=%20&d=e#f",
    "____----====>>>><<<<!!!!",
    "a" * 40 + " " * 40 + "b",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<s>[INST] hi [/INST]</s><unk>",
    "<end_of_turn>\n<tool> <0x0A> ▁▁ ▁x",
    "a<|im_end|>b <|im_end|> c",
]
CHATS = [
    [{"role": "user", "content": "Why does the sky look blue?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 👋  there\n"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "<|im_end|> & 'more'"},
    ],
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def smollm2(directory: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    backend = tokenizer.backend_tokenizer
    if b"Digits" not in backend.pre_tokenizer.__getstate__():
        # A directory that transformers converted from GGUF has lost this step of the original.
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    chats = [
        {
            "messages": messages,
            "prompt": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
            "ids": list(
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            ),
        }
        for messages in CHATS
    ]
    write(OUT / "smollm2.json", {"texts": ids_of(tokenizer), "chats": chats})


def ids_of(tokenizer: Any) -> list[dict[str, Any]]:
    return [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in TEXTS]


def save(name: str, tokenizer: Tokenizer, config: dict[str, Any], metadata: dict[str, Any]) -> None:
    write(OUT / name / "tokenizer.json", json.loads(tokenizer.to_str()))
    write(OUT / name / "tokenizer_config.json", config)
    write(OUT / name / "gguf.json", {f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    fast = PreTrainedTokenizerFast(tokenizer_file=str(OUT / name / "tokenizer.json"), **named)
    write(OUT / name / "ids.json", ids_of(fast))


def llama3() -> None:
    """Byte-level BPE with whole words kept, a BOS, and control tokens after the vocabulary."""
    tokenizer = Tokenizer(BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    controls = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in controls])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    begin = (controls[0], tokenizer.token_to_id(controls[0]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    size = tokenizer.get_vocab_size()
    model = json.loads(tokenizer.to_str())["model"]
    metadata = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [tokenizer.id_to_token(index) for index in range(size)],
        "token_type": [NORMAL] * (size - 6) + [CONTROL] * 5 + [USER_DEFINED],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": begin[1],
        "eos_token_id": tokenizer.token_to_id("<|eot_id|>"),
    }
    config = {"bos_token": controls[0], "eos_token": "<|eot_id|>"}
    save("llama3", tokenizer, config, metadata)


def pieces_of(corpus: Sequence[str]) -> list[str]:
    """Pieces of a SentencePiece-like vocabulary, best score first: joined ones, then characters."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    joined = list(dict.fromkeys("".join(pair) for pair in merges))
    return joined + sorted(token for token in tokenizer.get_vocab() if len(token) == 1)


def sentencepiece(name: str, controls: list[str], defined: list[str], prefix: bool) -> None:
    """SentencePiece BPE with byte fallback, as transformers converts it and as GGUF files hold it."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [piece for piece in pieces_of(CORPUS) if piece not in defined]
    if not prefix:  # as in Gemma: tabs are merged, and the tab's byte token is the tab
        byte_tokens[9], pieces = "\t", [*pieces, "\t\t", "\t\t\t"]
    tokens = [*controls, *defined, *byte_tokens, *pieces]
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(rank) for rank in range(len(pieces))]
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in controls])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in defined])
    bos, eos = ("<s>", "</s>") if prefix else ("<bos>", "<eos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
    )
    types = [UNKNOWN if token == "<unk>" else CONTROL for token in controls]
    types += [USER_DEFINED] * len(defined) + [BYTE] * 256 + [NORMAL] * len(pieces)
    metadata = {
        "model": "llama",
        "pre": "default",
        # The converter writes spaces in user-defined tokens as they are, with the score of an added token.
        "tokens": [in_gguf(token, token in defined) for token in tokens],
        "scores": [
            -1000.0 if token in defined else score for token, score in zip(tokens, scores, strict=True)
        ],
        "token_type": types,
        "bos_token_id": vocab[bos],
        "eos_token_id": vocab[eos],
        "unknown_token_id": vocab["<unk>"],
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": prefix,
    }
    save(name, tokenizer, {"bos_token": bos, "eos_token": eos, "unk_token": "<unk>"}, metadata)


def in_gguf(token: str, user_defined: bool) -> str:
    return "<0x09>" if token == "\t" else token.replace("▁", " ") if user_defined else token


def main() -> None:
    smollm2(sys.argv[1])
    llama3()
    sentencepiece("llama2", ["<unk>", "<s>", "</s>"], [], prefix=True)
    runs = ["\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "▁▁▁▁▁▁▁▁", "<tool>"]
    sentencepiece(
        "gemma", ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"], runs, prefix=False
    )


if __name__ == "__main__":
    main()
