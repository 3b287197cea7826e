"""How requests begin, end, are refused and are aborted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tests.fake_device import EOS, VOCAB_SIZE, FakeDevice, byte_tokenizer, logits_of, small_limits

from loadproof import CompletionDelta, RequestOutput, SamplingParams
from loadproof.engine.admission import RequestError
from loadproof.engine.engine import Engine
from loadproof.engine.request import Request

TOKENIZER = byte_tokenizer()
FORCE = 100.0


def _engine(**limits: int) -> Engine:
    return Engine(FakeDevice(small_limits(**limits)), TOKENIZER)


def _drain(engine: Engine) -> None:
    while engine.has_unfinished():
        engine.step()


def _complete(prompt: list[int], **params: Any) -> RequestOutput:
    outputs: list[RequestOutput] = []
    engine = _engine()
    engine.add_request(prompt, SamplingParams(**{"temperature": 0, **params}), on_output=outputs.append)
    _drain(engine)
    (output,) = outputs
    return output


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def _only(letter: str) -> dict[int, float]:
    """A bias that has the fake model write this letter and nothing else."""
    (token_id,) = _ids(letter)
    return {token_id: FORCE}


def test_length_ends_at_max_tokens() -> None:
    (completion,) = _complete([1], max_tokens=5, ignore_eos=True).outputs
    assert len(completion.token_ids) == 5
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_length_ends_at_the_models_limit(max_tokens: int | None) -> None:
    output = _complete([1] * 100, max_tokens=max_tokens, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 28
    assert output.outputs[0].finish_reason == "length"


def test_a_prompt_that_leaves_room_for_one_token() -> None:
    (completion,) = _complete([1] * 127, max_tokens=9).outputs
    assert len(completion.token_ids) == 1


def test_end_of_sequence_ends_without_text() -> None:
    (completion,) = _complete([1], logit_bias={EOS: FORCE}, skip_special_tokens=False).outputs
    assert completion.token_ids == [EOS]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", None)


def test_end_of_sequence_can_be_ignored() -> None:
    (completion,) = _complete([1], logit_bias={EOS: FORCE}, max_tokens=4, ignore_eos=True).outputs
    assert completion.token_ids == [EOS] * 4
    assert (completion.text, completion.finish_reason) == ("", "length")


@pytest.mark.parametrize(("include", "text"), [(False, ""), (True, "x")])
def test_a_stop_token_ends_and_is_named(include: bool, text: str) -> None:
    (x,) = _ids("x")
    output = _complete([1], logit_bias={x: FORCE}, stop_token_ids=[3, x], include_stop_str_in_output=include)
    (completion,) = output.outputs
    assert (completion.token_ids, completion.text) == ([x], text)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", x)


@pytest.mark.parametrize(("include", "text"), [(False, ""), (True, "xxx")])
def test_a_stop_string_across_tokens_cuts_the_text(include: bool, text: str) -> None:
    output = _complete([1], logit_bias=_only("x"), stop=["xxx"], include_stop_str_in_output=include)
    (completion,) = output.outputs
    assert (completion.text, len(completion.token_ids)) == (text, 3)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "xxx")


def test_text_held_back_for_a_stop_string_is_given_at_the_end() -> None:
    (completion,) = _complete([1], logit_bias=_only("x"), stop=["xxxxx"], max_tokens=4).outputs
    assert (completion.text, completion.finish_reason) == ("xxxx", "length")


def test_a_stop_string_in_the_last_token_wins_over_length() -> None:
    (completion,) = _complete([1], logit_bias=_only("x"), stop=["xxx"], max_tokens=3).outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", "xxx")


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    lead = TOKENIZER.encode("é")[0]
    (completion,) = _complete([1], logit_bias={lead: FORCE}, max_tokens=2).outputs
    assert completion.text == "\ufffd\ufffd"


def test_min_tokens_bans_ends_until_reached() -> None:
    (completion,) = _complete([1], logit_bias={EOS: FORCE}, min_tokens=6).outputs
    assert completion.token_ids[-1] == EOS
    assert len(completion.token_ids) == 7
    # Until then the best of the other tokens, as if there were no end.
    known = [1]
    for _ in range(6):
        logits = logits_of(known)
        logits[sorted(TOKENIZER.eos_token_ids)] = -1e9
        known.append(int(logits.argmax()))
    assert completion.token_ids[:6] == known[1:]


def test_ends_that_the_model_cannot_sample_are_passed_over() -> None:
    outputs: list[RequestOutput] = []
    engine = Engine(FakeDevice(vocab_size=EOS), TOKENIZER)
    engine.add_request([1], SamplingParams(max_tokens=4, min_tokens=2), on_output=outputs.append)
    _drain(engine)
    assert len(outputs[0].outputs[0].token_ids) == 4


def test_min_tokens_delays_stop_strings() -> None:
    (completion,) = _complete([1], logit_bias=_only("x"), stop=["xx"], min_tokens=5).outputs
    assert completion.text == "xxxxx"
    assert (len(completion.token_ids), completion.stop_reason) == (7, "xx")


def test_streamed_pieces_are_the_whole() -> None:
    deltas: list[CompletionDelta] = []
    outputs: list[RequestOutput] = []
    engine = _engine()
    params = SamplingParams(n=2, seed=4, max_tokens=60, logprobs=1, stop=["qz"])
    engine.add_request([1, 2], params, on_delta=deltas.append, on_output=outputs.append)
    _drain(engine)
    for completion in outputs[0].outputs:
        mine = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in mine) == completion.text
        assert [token for delta in mine for token in delta.token_ids] == completion.token_ids
        assert [entry for delta in mine for entry in delta.logprobs or []] == completion.logprobs
        assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == completion.finish_reason
        assert {delta.seed for delta in mine} == {completion.seed}


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 128, {}, "has 128 tokens; at most 127 fit, with one to generate, in max_model_len 128"),
        ([1, VOCAB_SIZE], {}, f"token id {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}"),
        ([-1], {}, "token id -1 is outside"),
        ([2**70], {}, "outside the vocabulary"),
        ([1.0], {}, r"integers, not 1\.0"),
        ([True], {}, "integers, not True"),
        ([1], {"stop_token_ids": [5, VOCAB_SIZE]}, f"stop_token_ids: {VOCAB_SIZE} is outside"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1}}, f"logit_bias: {VOCAB_SIZE} is outside"),
        ([1], {"logprobs": 21}, "logprobs 21 is above the limit of 20"),
        ([1], {"logprobs": -1}, f"logprobs {VOCAB_SIZE} is above the limit of 20"),
        ([1], {"min_tokens": 1, "stop_token_ids": list(range(VOCAB_SIZE))}, "leaves none to sample"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_door(
    prompt: list[int], params: dict[str, Any], message: str
) -> None:
    engine = _engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, SamplingParams(**params))
    assert not engine.has_unfinished()
    assert engine.stats()["num_requests"] == 0


def test_a_request_id_in_use_is_refused() -> None:
    engine = _engine()
    engine.add_request([1], SamplingParams(), request_id="a")
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request([1], SamplingParams(), request_id="a")
    _drain(engine)
    assert engine.add_request([1], SamplingParams(), request_id="a") == "a"


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_abort_frees_everything_and_tells_the_listener(num_steps: int) -> None:
    engine = _engine(max_num_batched_tokens=16)
    outputs: list[RequestOutput] = []
    deltas: list[CompletionDelta] = []
    params = SamplingParams(n=2, max_tokens=50, ignore_eos=True)
    name = engine.add_request([1] * 20, params, on_output=outputs.append, on_delta=deltas.append)
    for _ in range(num_steps):
        engine.step()
    assert engine.abort_request(name)
    assert not engine.abort_request(name)
    assert [completion.finish_reason for completion in outputs[0].outputs] == ["abort", "abort"]
    for completion in outputs[0].outputs:
        assert completion.text == "".join(delta.text for delta in deltas if delta.index == completion.index)
    stats = engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert not engine.has_unfinished()
    assert stats["num_aborted"] == 1


def test_abort_leaves_others_as_they_were() -> None:
    params = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
    alone = _complete([3], temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    engine = _engine()
    outputs: list[RequestOutput] = []
    victim = engine.add_request([1] * 30, params)
    engine.add_request([3], params, on_output=outputs.append)
    for _ in range(4):
        engine.step()
    engine.abort_request(victim)
    engine.add_request([2] * 30, params)
    _drain(engine)
    assert outputs[0].outputs == alone.outputs


def test_a_listener_may_abort_any_request_within_a_step() -> None:
    engine = _engine()
    told: list[tuple[str, str]] = []

    def stop_all(delta: CompletionDelta) -> None:
        for name in ("a", "b"):
            engine.abort_request(name)

    for name in ("a", "b"):
        engine.add_request(
            [1],
            SamplingParams(max_tokens=9, ignore_eos=True),
            request_id=name,
            on_delta=stop_all,
            on_output=lambda output: told.append((output.request_id, str(output.outputs[0].finish_reason))),
        )
    _drain(engine)
    assert sorted(told) == [("a", "abort"), ("b", "abort")]
    assert engine.stats()["num_free_blocks"] == engine.stats()["num_blocks"]


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("at", ["on_start", "on_delta"])
def test_what_is_aborted_within_a_step_ends_with_what_was_shown(at: str, logprobs: int | None) -> None:
    """Its token of this very step is there already, and has not been shown yet."""
    engine = _engine()
    shown: list[int] = []
    outputs: dict[str, RequestOutput] = {}

    def abort(*_: object) -> None:
        if at == "on_start" or len(shown) == 3:
            engine.abort_request("b")

    def receive(output: RequestOutput) -> None:
        outputs[output.request_id] = output

    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=logprobs)
    hooks: dict[str, Any] = {at: abort}
    engine.add_request([1], params, request_id="a", on_output=receive, **hooks)
    engine.add_request(
        [1], params, request_id="b", on_delta=lambda d: shown.extend(d.token_ids), on_output=receive
    )
    _drain(engine)
    (completion,) = outputs["b"].outputs
    assert completion.finish_reason == "abort"
    assert completion.token_ids == shown
    assert len(shown) == (0 if at == "on_start" else 3)
    assert completion.logprobs is None or len(completion.logprobs) == len(shown)
    assert len(outputs["a"].outputs[0].token_ids) == 6


def test_an_interrupt_while_a_request_is_queued_leaves_no_name_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = _engine()
    add = engine._pipeline.scheduler.add
    left = [None, KeyboardInterrupt(), None]

    def interrupted(request: Request) -> None:
        error = left.pop(0)
        if error is not None:
            raise error
        add(request)

    monkeypatch.setattr(engine._pipeline.scheduler, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.add_request([1], SamplingParams(n=2, max_tokens=2))
    assert not engine.has_unfinished()
    assert engine.stats()["num_waiting"] == 0
    engine.add_request([1], SamplingParams(max_tokens=2))
    _drain(engine)
    assert engine.stats()["num_finished"] == 1


def test_all_listeners_are_told_of_the_start_though_one_fails() -> None:
    engine = _engine()
    told: list[str] = []

    def fail() -> None:
        told.append("a")
        raise RuntimeError("it failed")

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request([1], params, request_id="a", on_start=fail)
    for name in ("b", "c"):
        engine.add_request([1], params, request_id=name, on_start=partial(told.append, name))
    with pytest.raises(RuntimeError, match="it failed"):
        _drain(engine)
    _drain(engine)
    assert told == ["a", "b", "c"]


def test_tokens_that_come_again_after_a_failure_count_once() -> None:
    engine = _engine()

    def fail(_: CompletionDelta) -> None:
        raise RuntimeError("it failed")

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request([1], params, on_delta=fail)
    engine.add_request([1], params)
    with pytest.raises(RuntimeError, match="it failed"):
        _drain(engine)
    _drain(engine)
    assert engine.stats()["generation_tokens"] == 1 + 4


def test_abort_in_the_final_step_tells_once() -> None:
    engine = _engine()
    outputs: list[RequestOutput] = []
    aborts: list[bool] = []
    engine.add_request(
        [1],
        SamplingParams(max_tokens=1, ignore_eos=True),
        request_id="a",
        on_delta=lambda delta: aborts.append(engine.abort_request(delta.request_id)),
        on_output=outputs.append,
    )
    _drain(engine)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"]
    assert aborts == [True]


def test_a_step_that_failed_can_be_run_again() -> None:
    params = SamplingParams(seed=5, max_tokens=20)
    alone = _complete([3] * 40, temperature=1.0, seed=5, max_tokens=20)
    for failing in range(1, 8):
        device = FakeDevice(small_limits(max_num_batched_tokens=16))
        device.fail_at_step = failing
        engine = Engine(device, TOKENIZER)
        outputs: list[RequestOutput] = []
        engine.add_request([3] * 40, params, on_output=outputs.append)
        with pytest.raises(RuntimeError, match="the device failed"):
            _drain(engine)
        _drain(engine)
        assert outputs[0].outputs == alone.outputs


def test_close_aborts_and_refuses() -> None:
    engine = _engine()
    outputs: list[RequestOutput] = []
    engine.add_request([1], SamplingParams(), on_output=outputs.append)
    engine.close()
    engine.close()
    assert outputs[0].outputs[0].finish_reason == "abort"
    with pytest.raises(RequestError, match="closed"):
        engine.add_request([1], SamplingParams())


def test_stats_count_tokens_and_requests() -> None:
    engine = _engine(max_num_batched_tokens=16)
    for _ in range(3):
        engine.add_request([1] * 20, SamplingParams(max_tokens=5, ignore_eos=True))
    assert engine.stats()["num_waiting"] == 3
    engine.step()
    assert (engine.stats()["num_running"], engine.stats()["num_waiting"]) == (1, 2)
    _drain(engine)
    stats = engine.stats()
    assert (stats["prompt_tokens"], stats["generation_tokens"]) == (60, 15)
    assert (stats["num_requests"], stats["num_finished"], stats["num_running"]) == (3, 3, 0)
