"""The chat template: a small program inside a model's files, and therefore run in a sandbox.

    messages  {"role": "user", "content": "Hi"}
    text      <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n

It is written in Jinja, with the settings that transformers uses. The sandbox denies access to
Python's internals and any change to the arguments. What could eat memory or time at one stroke is
limited too: loops over ranges, powers, repeated strings, the length of the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, str]  # {"role": "user", "content": "..."}
MAX_TEXT = 4_000_000  # characters of the whole chat, and of one product
MAX_INDENT = 16
_PADDING = {"format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs"}
MAX_RANGE = 100_000  # numbers from all ranges of one rendering


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    named_tokens: dict[str, str] | None = None,
) -> str:
    """Messages -> the text that the model was trained to continue.

    named_tokens: what the template may use by name: bos_token, eos_token and so on.

    Raises ValueError without a template, for malformed messages, and for whatever goes wrong
    inside the template.
    """
    if template is None:
        raise ValueError("messages need a chat template, and this model has none")
    _check_messages(messages)
    parts: list[str] = []
    length = 0
    try:
        for part in _compiled(template).generate(
            {
                **(named_tokens or {}),
                "messages": list(messages),
                "add_generation_prompt": add_generation_prompt,
                "range": _limited_range(),
            }
        ):
            parts.append(part)
            length += len(part)
            if length > MAX_TEXT:
                raise TemplateError(f"its text is longer than {MAX_TEXT} characters")
    except Exception as error:  # the template is foreign code: any exception is its answer
        raise ValueError(f"the chat template refused the messages: {error}") from error
    return "".join(parts)


def _check_messages(messages: Sequence[Message]) -> None:
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages must be a list of dicts, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages must hold at least one message, got none")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"messages must be dicts with role and content, got {message!r:.200}")
        for key in ("role", "content"):
            if not isinstance(message[key], str):
                raise ValueError(f"{key} must be a str, got {message[key]!r:.200}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with products and powers watched, and no second chance."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def wrap_str_format(self, value: Any) -> None:
        """No exception for `str.format`, which Jinja would allow."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Not the methods of str that pad to any width: they would build it before we can look."""
        if isinstance(obj, str) and attr in _PADDING:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse at once; Jinja would go on with an empty value."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that would fill the memory; sizes are known before they are computed."""
        for x, y in ((left, right), (right, left)):
            if isinstance(x, str | list | tuple) and isinstance(y, int) and len(x) * y > MAX_TEXT:
                raise TemplateError(f"a product is longer than {MAX_TEXT}")
        if operator == "%" and isinstance(left, str):
            raise TemplateError("formatting with % is not allowed")
        if operator == "**" and (abs(left) > 2**32 or abs(right) > 64):
            raise TemplateError(f"the power {left} ** {right} is too large")
        return super().call_binop(context, operator, left, right)


def _limited_range() -> Callable[..., range]:
    """`range` for one rendering: all together its ranges hold at most MAX_RANGE numbers."""
    left = MAX_RANGE

    def limited(*args: int) -> range:
        nonlocal left
        numbers = range(*args)
        left -= len(numbers)
        if left < 0:
            raise TemplateError(f"its ranges hold more than {MAX_RANGE} numbers")
        return numbers

    return limited


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= MAX_INDENT):
        raise TemplateError(f"tojson's indent must be 0 to {MAX_INDENT}, got {indent!r}")
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    for name in ("format", "center", "indent", "wordwrap"):  # make text of any width
        del environment.filters[name]
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    del environment.globals["lipsum"]  # makes text of any length
    return environment


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)
