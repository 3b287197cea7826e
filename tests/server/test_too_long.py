"""What is longer than the model takes is told with the numbers."""

from __future__ import annotations

import httpx
import pytest
from tests.server.test_errors import CHATS, COMPLETIONS, HI, check

pytestmark = pytest.mark.usefixtures("no_leak")


@pytest.mark.parametrize("streamed", [False, True])
def test_too_long_prompts_are_told_with_both_numbers(http: httpx.Client, streamed: bool) -> None:
    message = "the prompt has 256 tokens; at most 255 fit, with one to generate, in max_model_len 256"
    answer = http.post(COMPLETIONS, json={"prompt": [5] * 256, "stream": streamed})
    check(answer, 400, "prompt", message, "context_length_exceeded")
    answer = http.post(COMPLETIONS, json={"prompt": [[5], [5] * 256], "stream": streamed})
    check(answer, 400, "prompt[1]", f"prompt[1]: {message}", "context_length_exceeded")
    answer = http.post(CHATS, json={"messages": [{"role": "user", "content": "x" * 300}], "stream": streamed})
    assert answer.json()["error"]["param"] == "messages"
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("streamed", [False, True])
def test_prompt_and_output_too_long_are_told_with_both_numbers(http: httpx.Client, streamed: bool) -> None:
    body = {"prompt": [5] * 250, "stream": streamed}
    assert http.post(COMPLETIONS, json={**body, "max_tokens": 6}).status_code == 200
    assert http.post(COMPLETIONS, json=body).status_code == 200  # to the model's length
    message = (
        "max_tokens 7 is too large: the prompt has 250 tokens, which leaves room for 6 in max_model_len 256"
    )
    answer = http.post(COMPLETIONS, json={**body, "max_tokens": 7})
    check(answer, 400, "max_tokens", message, "context_length_exceeded")
    for name in ("max_tokens", "max_completion_tokens"):
        chat = {"messages": HI, name: 256, "stream": streamed}
        answer = http.post(CHATS, json=chat)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == name
