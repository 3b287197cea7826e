"""Names of prefixes, recomputed here from their definition."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scheduler_drive import BLOCK, Drive

from loadproof import SamplingParams
from loadproof.engine import prefix_keys
from loadproof.engine.block_pool import BlockKey
from loadproof.engine.prefix_keys import PrefixKeys, root_digest
from loadproof.engine.request import Request

ROOT = root_digest(None, 0)


def _request(prompt: list[int], output: list[int] | None = None) -> Request:
    request = Request("a", 0, prompt, SamplingParams(), 0, 99, frozenset())
    request.output_token_ids += output or []
    return request


def _keys(tokens: list[int], size: int = BLOCK, root: bytes = ROOT) -> list[BlockKey]:
    names = PrefixKeys(root, size)
    names.extend(_request(tokens))
    return names.keys


def _expected(tokens: list[int], size: int, root: bytes) -> list[BlockKey]:
    """The chain by its definition: SHA-256 of the parent's digest and the block's tokens."""
    keys = []
    digest = root
    for start in range(0, len(tokens) - len(tokens) % size, size):
        part = b"".join(struct.pack("=i", token) for token in tokens[start : start + size])
        digest = hashlib.sha256(digest + part).digest()
        keys.append(BlockKey(digest, part))
    return keys


@pytest.mark.parametrize("salt", [None, "tenant", "", "é"])
@pytest.mark.parametrize("generation", [0, 1, 300])
def test_the_root_is_a_digest_of_generation_and_salt(salt: str | None, generation: int) -> None:
    tail = b"-" if salt is None else b"+" + salt.encode()
    expected = hashlib.sha256(struct.pack("<Q", generation) + tail).digest()
    assert root_digest(salt, generation) == expected


def test_no_two_salts_or_generations_share_a_root() -> None:
    salts = [None, "", "-", "+", "a", "b", "a\0", "\ud800", "\udc00"]
    roots = {root_digest(salt, generation) for salt in salts for generation in (0, 1, 256)}
    assert len(roots) == 3 * len(salts)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.sampled_from([1, 3, 16]), st.binary(max_size=8))
def test_keys_are_a_hash_chain_over_full_blocks(tokens: list[int], size: int, root: bytes) -> None:
    assert _keys(tokens, size, root) == _expected(tokens, size, root)


@given(st.data())
def test_keys_made_little_by_little_are_those_made_at_once(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=40))
    num_prompt = data.draw(st.integers(1, len(tokens)))
    request = _request(tokens[:num_prompt])
    names = PrefixKeys(ROOT, BLOCK)
    while request.num_tokens < len(tokens):
        names.extend(request)
        assert len(names.keys) == request.num_tokens // BLOCK
        more = data.draw(st.integers(1, len(tokens) - request.num_tokens))
        request.output_token_ids += tokens[request.num_tokens : request.num_tokens + more]
    names.extend(request)
    names.extend(request)
    assert names.keys == _expected(tokens, BLOCK, ROOT)


def test_what_is_prompt_and_what_is_output_makes_no_difference() -> None:
    names = PrefixKeys(ROOT, BLOCK)
    names.extend(_request([1, 2, 3], [4, 5, 6, 7, 8, 9]))
    assert names.keys == _keys([1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1])
def test_a_block_that_is_not_full_has_no_name(count: int) -> None:
    assert _keys([1] * count) == []
    assert len(_keys([1] * (BLOCK + count))) == 1


def test_tokens_after_the_prefix_change_no_name_of_it() -> None:
    assert _keys([1, 2, 3, 4, 5])[:1] == _keys([1, 2, 3, 4, 9, 9, 9, 9])[:1]


def test_any_earlier_token_changes_all_later_names() -> None:
    changed = _keys([1, 2, 3, 5, 6, 6, 6, 6])
    kept = _keys([1, 2, 3, 4, 6, 6, 6, 6])
    assert changed[1].tokens == kept[1].tokens
    assert changed[1].digest != kept[1].digest


class _Collision:
    """A hash that tells blocks apart by their place alone: a root's is 0, a child's its parent's plus 1."""

    def __init__(self, data: bytes) -> None:
        self._place = int.from_bytes(data[:32]) + 1 if len(data) > 32 else 0

    def digest(self) -> bytes:
        return self._place.to_bytes(32)


class _Colliding:
    sha256 = _Collision


def test_a_collision_of_digests_is_never_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_keys, "hashlib", _Colliding)
    drive = Drive()
    first = drive.add("a", 9, 1)
    drive.drain()
    second, third = drive.add("b", 9, 1), drive.add("a", 9, 1)
    drive.drain()
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    # The prompt whose blocks were offered first has them even so.
    assert third.num_cached_tokens == 2 * BLOCK


def test_tokens_may_be_taken_back_and_others_come() -> None:
    """As after a failed step whose tokens nobody was shown."""
    request = _request([1, 2, 3], [4, 5, 6, 7, 8])
    names = PrefixKeys(ROOT, BLOCK)
    names.extend(request)
    del request.output_token_ids[0:]
    names.extend(request)
    assert names.keys == _expected([1, 2, 3], BLOCK, ROOT)
    request.output_token_ids += range(40, 50)
    names.extend(request)
    assert names.keys == _expected([1, 2, 3, *range(40, 50)], BLOCK, ROOT)
