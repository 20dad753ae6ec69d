"""Parameters that this server knows and cannot serve yet, and those it does not know at all.

A known one is refused when its value would change the answer, because silence would be a wrong answer;
its neutral values are accepted. Unknown ones are ignored with one warning each (OpenAI's own habit).
"""

import logging
from collections.abc import Iterable, Mapping

from serving.api.errors import ApiError

_log = logging.getLogger(__name__)

_MAX_WARNED = 256
_MAX_NAME_LENGTH = 80

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    # extensions of other servers
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "skip_special_tokens": (None, True),
    "add_special_tokens": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
}

_HARMLESS = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "spaces_between_special_tokens",
    }
)
"""They cannot change the tokens."""


def refuse_unsupported(fields: Mapping[str, object], also_neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raise ApiError 400 for the first known parameter whose value would change the answer.

    Args:
        fields: the request body.
        also_neutral: further parameters of this endpoint, with their neutral values.
    """
    for name, neutral in (*_NEUTRAL.items(), *also_neutral.items()):
        if name in fields and fields[name] not in neutral:
            msg = f"{name} is not supported by this server yet; leave it out"
            raise ApiError(400, msg, param=name, code="unsupported_parameter")


class UnknownFieldLog:
    """Warns of each unknown parameter once."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._warned: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log those that are new. What is remembered is bounded, whatever clients send."""
        for name in names:
            if name in _HARMLESS or name in _NEUTRAL or name in self._warned or len(self._warned) >= _MAX_WARNED:
                continue
            self._warned.add(name)
            _log.warning("unknown request parameter %r is ignored", name[:_MAX_NAME_LENGTH])
