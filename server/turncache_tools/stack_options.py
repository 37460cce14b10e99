"""The options that describe a stack, defined once for the verbs that take them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, cast

import typer

from turncache.errors import UsageError
from turncache_server.launch.spec import Device, Kind, StackSpec
from turncache_tools.options import with_options
from turncache_tools.shell import assignments, extra_arguments

_PORTS = "Ports and places"


def stack_spec(
    ctx: typer.Context,
    *,
    model: Annotated[str, typer.Option(help="Folder, hub name, or tiny or smollm2 (made here).")],
    prefill: Annotated[int, typer.Option(help="Prefill engines; 0: one engine for both.")] = 0,
    decode: Annotated[int, typer.Option(help="Decode engines.")] = 0,
    kind: Annotated[
        str, typer.Option(help="turncache, or stock: plain, nixl, nixl-bidirectional.")
    ] = "turncache",
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the API.")
    ] = None,
    mode: Annotated[str, typer.Option(help="on, observe or off.")] = "on",
    return_enabled: Annotated[
        bool, typer.Option("--return/--no-return", help="Take KV back from decode to prefill.")
    ] = True,
    router: Annotated[
        bool, typer.Option("--router/--no-router", help="Put the router in front.")
    ] = True,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: what vLLM was built for.")
    ] = "auto",
    gpus: Annotated[
        list[str] | None,
        typer.Option(help="GPUs of one engine, such as 0,1; once for every engine."),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs per engine.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence in tokens.")] = None,
    dtype: Annotated[str | None, typer.Option(help="As vllm serve --dtype.")] = None,
    num_blocks: Annotated[
        list[str] | None, typer.Option(help="KV blocks of one side, such as prefill=400.")
    ] = None,
    kv_space_gib: Annotated[int, typer.Option(help="KV space of one CPU engine.")] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the extension: name=value.")
    ] = None,
    router_settings: Annotated[
        list[str] | None, typer.Option("--set-router", help="Setting of the router: name=value.")
    ] = None,
    stop_grace: Annotated[
        float, typer.Option(help="Seconds between TERM and KILL when a part is stopped.")
    ] = 2.0,
    host: Annotated[
        str, typer.Option(help="Address that clients reach.", rich_help_panel=_PORTS)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port of the router; 0: free ones.", rich_help_panel=_PORTS)
    ] = 8000,
    engine_port: Annotated[
        int | None, typer.Option(help="First engine port (8100).", rich_help_panel=_PORTS)
    ] = None,
    decode_port: Annotated[
        int | None, typer.Option(help="First decode port (8200).", rich_help_panel=_PORTS)
    ] = None,
    nixl_port: Annotated[
        int | None, typer.Option(help="First NIXL port (5600).", rich_help_panel=_PORTS)
    ] = None,
    control_port: Annotated[
        int | None, typer.Option(help="First control port (5800).", rich_help_panel=_PORTS)
    ] = None,
    fleet_secret_file: Annotated[
        Path | None,
        typer.Option(
            help="Secret of the control plane, shared by engines and router.",
            rich_help_panel=_PORTS,
        ),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs.", rich_help_panel=_PORTS)
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            envvar="TURNCACHE_ENGINE_PYTHON",
            help="Interpreter of the engine environment; this one by default.",
            rich_help_panel=_PORTS,
        ),
    ] = None,
) -> StackSpec:
    """Turn options into a specification.

    Raises:
        UsageError: naming the option, its value and what was expected.
    """
    blocks = assignments(num_blocks or (), "--num-blocks")
    for side, count in blocks.items():
        if type(count) is not int:
            raise UsageError(f"--num-blocks {side}={count}: expected a number of blocks")
    return StackSpec(
        model=model,
        prefill=prefill,
        decode=decode,
        kind=cast("Kind", kind),
        served_name=served_model_name,
        mode=mode,
        return_enabled=return_enabled,
        router=router,
        device=cast("Device", device),
        devices=tuple(gpus or ()),
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max_model_len,
        dtype=dtype,
        num_blocks=blocks,
        kv_space_gib=kv_space_gib,
        settings=assignments(settings or (), "--set"),
        router_settings=assignments(router_settings or (), "--set-router"),
        host=host,
        router_port=port,
        engine_port=engine_port,
        decode_port=decode_port,
        nixl_port=nixl_port,
        control_port=control_port,
        fleet_secret_file=fleet_secret_file and fleet_secret_file.expanduser().absolute(),
        log_dir=log_dir,
        python=python,
        stop_grace_s=stop_grace,
        engine_args=extra_arguments(ctx),
    )


def takes_stack(verb: Callable[..., None]) -> Callable[..., None]:
    """Give ``verb(spec, ...)`` the options of :func:`stack_spec` in the place of ``spec``."""
    return with_options(verb, of=stack_spec, place="spec")
