"""``strataflux serve``: an OpenAI-style API for a prepared model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strataflux.client.cli.kv_options import (
    FractionOption,
    GroupOption,
    KvOption,
    KvSelectOption,
    PrenormalizeOption,
    RefineKvOption,
    parse_kv,
)
from strataflux.client.cli.options import (
    ChannelsOption,
    JsonOption,
    MissOption,
    PreparedArgument,
    RuntimeDirOption,
    parse_miss,
)
from strataflux.client.cli.output import Output, print_note, progress
from strataflux.client.cli.read_ahead import LagOption, ReadAheadOption, ResidentsOption
from strataflux.client.errors import InputError, MisuseError
from strataflux.proto.extras import install_command

if TYPE_CHECKING:
    from strataflux.client.prepare.prepared import PreparedModel
    from strataflux.client.serve.chat import ChatRenderer
    from strataflux.client.serve.model import ModelOptions

__all__ = ["register"]

_EXTRA = {"starlette", "uvicorn", "jinja2"}
_CONTEXT = 4096

_HostOption = Annotated[str, typer.Option(help="Address to listen on.")]
_PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")]
_KeyOption = Annotated[
    Path | None,
    typer.Option("--api-key-file", help="A file with the key that clients must send.", show_default="no key"),
]
_NameOption = Annotated[
    str | None, typer.Option("--name", help="What the model is called.", show_default="its folder's name")
]
_SequencesOption = Annotated[int, typer.Option(min=1, max=64, help="Requests decoded at once, a token each in turn.")]
_QueueOption = Annotated[int, typer.Option(min=0, max=4096, help="Requests that may wait; others are refused (429).")]
_ContextOption = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of prompt and answer together.", show_default=f"the model's, at most {_CONTEXT}"),
]
_TemplateOption = Annotated[
    Path | None, typer.Option(help="A Jinja chat template.", show_default="the prepared model's own")
]
_RefinePromptOption = Annotated[
    bool,
    typer.Option("--refine-prompt", help="Refine prompts, too: token by token, not in one pass."),
]
_RequireOption = Annotated[
    bool, typer.Option("--require-daemon", help="Refuse to serve when no daemon refines this model.")
]


def _command(
    folder: PreparedArgument,
    host: _HostOption = "127.0.0.1",
    port: _PortOption = 8000,
    api_key_file: _KeyOption = None,
    name: _NameOption = None,
    sequences: _SequencesOption = 4,
    queue: _QueueOption = 32,
    context: _ContextOption = None,
    chat_template: _TemplateOption = None,
    refine_prompt: _RefinePromptOption = False,
    k: ChannelsOption = None,
    miss: MissOption = "skip",
    read_ahead: ReadAheadOption = 0.0,
    residents: ResidentsOption = 0,
    lag: LagOption = None,
    kv: KvOption = None,
    refine_kv: RefineKvOption = "4/4",
    group: GroupOption = 4,
    fraction: FractionOption = "1/128",
    kv_select: KvSelectOption = "step",
    prenormalize: PrenormalizeOption = False,
    runtime_dir: RuntimeDirOption = None,
    require_daemon: _RequireOption = False,
    as_json: JsonOption = False,
) -> None:
    """Serve a prepared model over HTTP, for clients of OpenAI's API, until a signal.

    /v1/models, /v1/completions and /v1/chat/completions, whole or streamed; /healthz says how busy it is. A client that
    hangs up ends its request. Without a daemon that serves this model answers are those of the low-bit weights alone,
    and a note says so; a daemon that comes later is found.
    """
    _require_extra()
    from strataflux.client.prepare.prepared import open_prepared
    from strataflux.client.serve.model import ModelOptions

    options = None if kv is None else parse_kv(kv, refine_kv, group, fraction, prenormalize, kv_select)
    policy, key = parse_miss(miss), _read_key(api_key_file)
    prepared = open_prepared(folder)
    positions = _positions(prepared, context)
    model_options = ModelOptions(
        positions, sequences, runtime_dir, k, policy, options, require_daemon, read_ahead, residents, lag
    )
    settings = _Settings(host, port, key, name or folder.resolve().name, queue, refine_prompt)
    _serve(Output(as_json), prepared, settings, model_options, _renderer(prepared, chat_template))


class _Settings:
    """How the server is reached, beside the model."""

    def __init__(self, host: str, port: int, key: str | None, name: str, queue: int, refine_prompt: bool) -> None:
        self.host, self.port, self.key = host, port, key
        self.name, self.queue, self.refine_prompt = name, queue, refine_prompt


def _serve(
    output: Output,
    prepared: "PreparedModel",
    settings: _Settings,
    options: "ModelOptions",
    chat: "ChatRenderer | None",
) -> None:
    from strataflux.client.runtime.models import DecoderWeights
    from strataflux.client.serve.app import Service, make_app
    from strataflux.client.serve.engine import Engine, Limits
    from strataflux.client.serve.guard import is_loopback
    from strataflux.client.serve.listen import address_of, listen
    from strataflux.client.serve.model import ServedModel
    from strataflux.client.serve.server import run

    with listen(settings.host, settings.port) as bound:  # first: a port in use is told before a model is read
        with progress("reading the model"):
            weights = DecoderWeights.read(prepared)
        tokenizer = prepared.tokenizer()
        model = ServedModel(prepared, weights, options, print_note)
        limits = Limits(options.sequences, settings.queue)
        engine = Engine(model, tokenizer, limits, refine_prompt=settings.refine_prompt)
        loopback = is_loopback(bound.getsockname()[0])
        service = Service(
            name=settings.name,
            digest=prepared.manifest.digest,
            created=int(prepared.folder.stat().st_mtime),
            context=options.context,
            vocabulary=prepared.config.vocabulary,
            tokenizer=tokenizer,
            chat=chat,
            engine=engine,
            key=settings.key,
            loopback=loopback,
        )
        if settings.key is None and not loopback:
            print_note(f"whoever reaches {address_of(bound)} may use it; --api-key-file asks for a key")

        def ready() -> None:
            refined = engine.state().refined
            output.print(f"serving {settings.name} at {address_of(bound)}/v1")
            output.result({"url": f"{address_of(bound)}/v1", "model": settings.name, "refined": refined})

        run(make_app(service), engine, bound, ready)


def _require_extra() -> None:
    """Refuse before anything is read.

    Raises:
        MisuseError: what this command needs is not installed.
    """
    from importlib.util import find_spec

    if missing := sorted(module for module in _EXTRA if find_spec(module) is None):
        raise MisuseError("strataflux serve", f"no {', '.join(missing)}", "the extra serve", install_command("serve"))


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(path, f"{error}", "a readable file with a key", "mend --api-key-file") from error
    if not key or not key.isprintable() or not key.isascii():
        raise InputError(path, f"{len(key)} characters", "a key of printable ASCII", "write one, such as openssl rand")
    return key


def _positions(prepared: "PreparedModel", asked: int | None) -> int:
    most = prepared.config.context
    if asked is not None and asked > most:
        raise MisuseError("--context", f"{asked} tokens", f"at most the model's {most}", "lower it")
    return asked or min(most, _CONTEXT)


def _renderer(prepared: "PreparedModel", path: Path | None) -> "ChatRenderer | None":
    from strataflux.client.prepare.chat import ChatTemplate, read_chat
    from strataflux.client.serve.chat import ChatRenderer

    chat = read_chat(prepared.folder)
    if path is not None:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(path, f"{error}", "a readable Jinja template", "mend --chat-template") from error
        chat = ChatTemplate(text, chat.bos_token, chat.eos_token) if chat else ChatTemplate(text)
    return None if chat is None else ChatRenderer(chat)


def register(app: typer.Typer) -> None:
    """Add ``serve``."""
    app.command("serve")(_command)
