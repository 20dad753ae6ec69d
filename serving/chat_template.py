"""`ChatTemplate`: a model's own chat template, rendered as transformers renders it.

The template comes with the model's files and is therefore untrusted: it runs in jinja2's immutable
sandbox and sees plain values only.

Source: the environment (options, filters, globals, the `generation` tag) is the one that transformers'
`apply_chat_template` documents; written anew here so that serving needs no transformers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template is broken, or refuses these messages."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote; here it only passes through."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body, unchanged."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """One compiled template.

    Attributes:
        knows_tools: it writes tools into the prompt itself.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        """Compile.

        Args:
            source: jinja2 text.
            special_tokens: `bos_token`, `eos_token` and so on, as the template sees them.
            now: the clock behind `strftime_now`.

        Raises:
            ChatTemplateError: the text is no valid template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self.knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            msg = f"the model's chat template does not compile: {error}"
            raise ChatTemplateError(msg) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text.

        Raises:
            ChatTemplateError: the template refused the messages (`raise_exception`) or could not render them.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(error.message or type(error).__name__) from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # Expressions of the template raise Python's own errors.
            msg = f"the model's chat template failed: {error}"
            raise ChatTemplateError(msg) from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 -- templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    # jinja2's own filter escapes HTML, which would reach the model.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
