"""Chat templates are programs of strangers: they get messages and nothing else."""

import datetime

import pytest

from strataflux.client.errors import InputError
from strataflux.client.prepare.chat import ChatTemplate
from strataflux.client.serve.chat import ChatRenderer
from strataflux.client.serve.errors import RequestError
from strataflux.client.serve.schemas import Message

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = (Message("system", "be <brief>"), Message("user", "hi"))


def render(template: str) -> str:
    return ChatRenderer(ChatTemplate(template, "<s>", "</s>")).render(TURNS)


def test_a_common_template() -> None:
    expected = "<|im_start|>system\nbe <brief><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML) == expected


def test_what_templates_expect_is_there() -> None:
    assert render("{{ bos_token }}{{ eos_token }}{{ tools is none }}") == "<s></s>True"
    assert render("{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}x{% endfor %}") == "x"
    assert render("{{ messages[0] | tojson }}") == '{"role": "system", "content": "be <brief>"}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


def test_a_template_may_refuse_and_says_why() -> None:
    with pytest.raises(RequestError, match="only user turns") as refused:
        render("{{ raise_exception('only user turns') }}")
    assert (refused.value.status, refused.value.parameter) == (400, "messages")


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"])
def test_the_sandbox_holds(attack: str) -> None:
    with pytest.raises(RequestError, match="SecurityError"):
        render(attack)


def test_a_template_that_does_not_compile_is_an_error_of_the_model() -> None:
    with pytest.raises(InputError, match=r"chat\.json"):
        ChatRenderer(ChatTemplate("{% for %}"))
