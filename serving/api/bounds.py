"""What is refused by its length alone, before anything looks at its items.

A body may have a million items. To look at each of them takes seconds in one piece, in which no stream of this door
gets a token.
"""

from collections.abc import Mapping

from serving.api.errors import ApiError
from serving.generation_request import DoorSettings, prompt_too_long

MAX_FIELDS = 1024


def refuse_floods(body: Mapping[str, object], max_prompts: int, settings: DoorSettings) -> None:
    """Check lengths.

    Args:
        body: as it came.
        max_prompts: of one completion request.
        settings: the context's length: a token, like a message, takes at least one place in it.

    Raises:
        ApiError: too many fields or prompts.
        InvalidRequestError: a prompt that cannot fit the context.
    """
    if len(body) > MAX_FIELDS:
        raise ApiError(400, f"the body has {len(body)} fields; at most {MAX_FIELDS} are allowed")
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], str | list):
            if len(prompt) > max_prompts:
                msg = f"the request has {len(prompt)} prompts; at most {max_prompts} are allowed"
                raise ApiError(400, msg, param="prompt")
            longest = max(len(part) for part in prompt if isinstance(part, list)) if isinstance(prompt[0], list) else 0
        else:
            longest = len(prompt)
        if longest >= settings.context_length:
            raise prompt_too_long(str(longest), settings)
    if isinstance(messages, list) and len(messages) >= settings.context_length:
        wording = f"at least {len(messages)}"
        raise prompt_too_long(wording, settings)
