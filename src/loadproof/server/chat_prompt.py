"""From a chat's messages to the prompt's tokens, for those routes that take chats."""

from __future__ import annotations

from loadproof.engine.chats import TemplateOptions
from loadproof.engine.prompts import TokenizedPrompt
from loadproof.server.answers import refusing
from loadproof.server.bounds import check_text
from loadproof.server.errors import bad_request
from loadproof.server.schemas.chat import ChatRequest
from loadproof.server.schemas.tokens import TokenizeRequest
from loadproof.server.state import ServerState

# Fields of the request's own, whatever the settings allow.
_TAKEN = frozenset({"messages", *TemplateOptions.__annotations__})


def chat_prompt(state: ServerState, body: ChatRequest | TokenizeRequest) -> TokenizedPrompt:
    """The prompt by the model's template; 400 for a chat that it refuses. Slow enough for a thread."""
    variables = body.chat_template_kwargs or {}
    known = [name for name in state.config.template_arguments if name not in _TAKEN]
    unknown = sorted(variables.keys() - set(known))
    if unknown:
        allowed = ", ".join(known)
        raise bad_request(
            f"chat_template_kwargs may set {allowed}, and not {', '.join(unknown)}"[:500],
            "chat_template_kwargs",
        )
    goes_on = bool(body.continue_final_message)
    begins = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    salt = body.cache_salt if isinstance(body, ChatRequest) else None
    tokenizer = state.llm.tokenizer
    with refusing(body, "messages"):
        text = tokenizer.apply_chat_template(
            [message.for_template() for message in body.messages or ()],
            add_generation_prompt=begins,
            continue_final_message=goes_on,
            **variables,
        )
        check_text(state, text, "messages")
        ids = tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    return TokenizedPrompt(ids, text, salt)
