"""Model directories: where each part may lie, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from loadproof.tokenizer import ChatTemplateError, Tokenizer, TokenizerError, load_tokenizer
from loadproof.tokenizer.library import library_errors

GOLDEN = Path(__file__).parent.parent / "golden" / "tokenizer"
HI = [{"role": "user", "content": "hi"}]


def directory(tmp_path: Path, family: str = "llama3", **config: Any) -> Path:
    shutil.copy(GOLDEN / family / "tokenizer.json", tmp_path)
    shutil.copy(GOLDEN / family / "tokenizer_config.json", tmp_path)
    change(tmp_path / "tokenizer_config.json", **config)
    return tmp_path


def change(path: Path, **values: Any) -> None:
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**found, **values}), encoding="utf-8")


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


@pytest.mark.parametrize("wrapped", [False, True])
def test_named_tokens(tmp_path: Path, wrapped: bool) -> None:
    eos: Any = {"content": "<|im_end|>", "lstrip": False} if wrapped else "<|im_end|>"
    tokenizer = load_tokenizer(directory(tmp_path, eos_token=eos))
    assert tokenizer.eos_id == id_of(tokenizer, "<|im_end|>")
    assert tokenizer.bos_id == id_of(tokenizer, "<|begin_of_text|>")


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    path = directory(tmp_path)
    own = load_tokenizer(path).eos_id
    assert load_tokenizer(path, {"eos_token_id": 5}).eos_token_ids == {own, 5}
    assert load_tokenizer(path, {"eos_token_id": 5}, {"eos_token_id": [6, 7]}).eos_token_ids == {own, 6, 7}
    assert load_tokenizer(path, {"eos_token_id": None}, {}).eos_token_ids == {own}
    for wrong in ("7", -1, [True], [[1]]):
        with pytest.raises(TokenizerError, match="eos_token_id is a token id or a list"):
            load_tokenizer(path, {"eos_token_id": wrong})


def test_flags_overrule_the_post_processor(tmp_path: Path) -> None:
    plain = load_tokenizer(directory(tmp_path)).encode("the", add_special_tokens=False)
    bos, eos = load_tokenizer(tmp_path).bos_id, load_tokenizer(tmp_path).eos_id
    assert load_tokenizer(tmp_path).encode("the") == [bos, *plain]
    assert load_tokenizer(directory(tmp_path, add_bos_token=False)).encode("the") == plain
    both = load_tokenizer(directory(tmp_path, add_bos_token=True, add_eos_token=True))
    assert both.encode("the") == [bos, *plain, eos]


def test_a_token_that_is_named_is_special(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directory(tmp_path, pad_token="<tool>"))
    assert tokenizer.is_special(id_of(tokenizer, "<tool>"))
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "ab"


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    size = load_tokenizer(directory(tmp_path)).vocab_size
    listed = {
        str(size): {"content": "<|new|>", "special": True},
        str(size + 1): {"content": "<think>", "special": False},
        "0": {"content": "!", "special": False},
    }
    tokenizer = load_tokenizer(directory(tmp_path, added_tokens_decoder=listed))
    assert tokenizer.encode("<|new|><think>", add_special_tokens=False) == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<think>"
    assert tokenizer.vocab_size == size + 2
    wrong = {"7": {"content": "<|new|>"}}
    with pytest.raises(TokenizerError, match=f"gives '<.new.>' the id 7, not {size}"):
        load_tokenizer(directory(tmp_path, added_tokens_decoder=wrong))
    for malformed in ({"x": {"content": "a"}}, {"1": "a"}, {"9" * 5000: {"content": "a"}}, [1]):
        with pytest.raises(TokenizerError, match="added_tokens_decoder maps ids to tokens"):
            load_tokenizer(directory(tmp_path, added_tokens_decoder=malformed))


def test_chat_template_in_either_place(tmp_path: Path) -> None:
    path = directory(tmp_path)
    assert not load_tokenizer(path).has_chat_template
    change(path / "tokenizer_config.json", chat_template="in config")
    assert load_tokenizer(path).apply_chat_template(HI) == "in config"
    change(path / "chat_template.json", chat_template="in json")
    assert load_tokenizer(path).apply_chat_template(HI) == "in json"
    (path / "chat_template.jinja").write_text("in file {{ bos_token }}", encoding="utf-8")
    assert load_tokenizer(path).apply_chat_template(HI) == "in file <|begin_of_text|>"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools", encoding="utf-8")
    assert load_tokenizer(path).apply_chat_template(HI, tools=[{}]) == "for tools"
    assert load_tokenizer(path).has_chat_template


def test_a_list_of_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = load_tokenizer(directory(tmp_path, chat_template=named))
    assert tokenizer.apply_chat_template(HI) == "plain"
    assert tokenizer.apply_chat_template(HI, tools=[{}]) == "tools"
    for malformed in (3, ["x"], [{"name": "default"}], {"default": "x"}):
        with pytest.raises(TokenizerError, match="a template or a list of named templates"):
            load_tokenizer(directory(tmp_path, chat_template=malformed))


def test_a_prompt_has_no_second_bos(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = load_tokenizer(directory(tmp_path, chat_template=template))
    ids = tokenizer.encode_chat(HI)
    assert ids == tokenizer.encode("hi")
    assert ids.count(tokenizer.bos_id or 0) == 1


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="the model has no chat template: give the prompt as text"):
        load_tokenizer(directory(tmp_path)).apply_chat_template(HI)
    only_tools = directory(tmp_path, chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(ChatTemplateError, match=r"no chat template; it has \['rag'\]"):
        load_tokenizer(only_tools).apply_chat_template(HI)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    path = directory(tmp_path)
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    change(path / "tokenizer.json", truncation=truncation)
    assert len(load_tokenizer(path).encode("a b c d e f g")) > 7


def test_a_directory_without_a_config_still_loads(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "llama3" / "tokenizer.json", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id is None
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.encode("the") == load_tokenizer(GOLDEN / "llama3").encode("the")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", b"{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", b"\xff\xfe", "tokenizer_config.json is not UTF-8"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = directory(tmp_path)
    (path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing$"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"missing \(tokenizer\.model alone is not read\)"):
        load_tokenizer(tmp_path)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = directory(tmp_path)
    with (path / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 34)  # sparse
    with pytest.raises(TokenizerError, match="has 17179869184 bytes; at most"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "has no decoder"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, 'not supported: {"type": "WordPiece"'),
        ({"type": "Strip", "content": " ", "start": 1, "stop": 0}, 'not supported: {"type": "Strip"'),
        ({"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}, 'not supported: {"type": "Replace"'),
    ],
)
def test_decoders_that_are_not_rules_over_tokens_are_refused(
    tmp_path: Path, decoder: Any, message: str
) -> None:
    path = directory(tmp_path)
    change(path / "tokenizer.json", decoder=decoder)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(path)


@pytest.mark.parametrize(("scheme", "text"), [("always", "the"), ("first", "the"), ("never", " the")])
def test_a_metaspace_decoder_drops_the_space_it_put(tmp_path: Path, scheme: str, text: str) -> None:
    path = directory(tmp_path, "llama2")
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    change(path / "tokenizer.json", decoder=decoder)
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode([id_of(tokenizer, "▁the")]) == text


def test_texts_that_are_not_unicode_are_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directory(tmp_path))
    with pytest.raises(ValueError, match="a lone surrogate at position 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(ValueError, match="a text is a string, not bytes"):
        tokenizer.encode(b"a")  # type: ignore[arg-type]


def test_a_batch_is_each_of_its_texts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directory(tmp_path))
    texts = ["", "the quick", "a <|eot_id|>"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_ids_far_apart_take_no_memory_between_them(tmp_path: Path) -> None:
    path = directory(tmp_path)
    value = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    token = value["added_tokens"][-1]

    def load_with(token_id: int) -> Tokenizer:
        token["id"] = value["model"]["vocab"][token["content"]] = token_id
        change(path / "tokenizer.json", **value)
        (path / "tokenizer_config.json").unlink(missing_ok=True)
        return load_tokenizer(path)

    sparse = load_with((1 << 22) - 1)
    assert sparse.token_bytes((1 << 22) - 1) == token["content"].encode()
    assert sparse.token_bytes((1 << 22) - 2) == sparse.token_bytes(1 << 70) == b""
    assert len(sparse._bytes._known) == 1  # nothing is kept for ids that name no token
    with pytest.raises(TokenizerError, match="ids up to 400000000; at most 4194304 are read"):
        load_with(400_000_000)


def changed_tokenizer(tmp_path: Path, **values: Any) -> Path:
    path = directory(tmp_path)
    (path / "tokenizer_config.json").unlink()
    change(path / "tokenizer.json", **values)
    return path


def test_what_the_library_panics_at_is_an_error(tmp_path: Path) -> None:
    model = json.loads((GOLDEN / "llama3" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    ends = ["<|begin_of_text|>", "<|eot_id|>"]  # the library joins them and finds no such token
    path = changed_tokenizer(tmp_path, model={**model, "merges": [*model["merges"], ends]})
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(path)


def test_what_the_library_fails_at_later_is_an_error_when_loading(tmp_path: Path) -> None:
    undefined = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "nowhere", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {},
    }
    with pytest.raises(TokenizerError, match=r"the tokenizer fails|is not a tokenizer"):
        load_tokenizer(changed_tokenizer(tmp_path, post_processor=undefined))


def test_a_vocabulary_without_an_unknown_token_fails_at_texts_alone(tmp_path: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "nowhere"}
    tokenizer = load_tokenizer(changed_tokenizer(tmp_path, model=words, pre_tokenizer=None))
    assert tokenizer.encode("a", add_special_tokens=False) == [0]
    with pytest.raises(TokenizerError, match="the tokenizer fails"):
        tokenizer.encode("b")


def test_interrupts_pass_through() -> None:
    for error in (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        with pytest.raises(error), library_errors("never seen"):
            raise error
