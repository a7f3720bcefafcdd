"""`manylora simulate`: what a trace of requests would have met under each eviction policy, without an engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manylora.adapter import shown
from manylora.cli import views
from manylora.cli.output import Json, bytes_text, print_json, print_table, say
from manylora.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from manylora.tiers.simulation import Node, Outcome
    from manylora.tiers.traces import Request

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def simulate(
    trace: Annotated[Path | None, typer.Argument(metavar="TRACE", help="JSON lines, one request each.")] = None,
    generate: Annotated[
        str | None, typer.Option("--generate", metavar="zipf|bursty", help="Make a trace up instead.")
    ] = None,
    adapters: Annotated[int | None, typer.Option("--adapters", metavar="N", min=1, help="[default: 500]")] = None,
    requests: Annotated[int | None, typer.Option("--requests", metavar="N", min=1, help="[default: 20000]")] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="R", min=0.001, help="Requests a second [default: 20].")
    ] = None,
    skew: Annotated[
        float | None,
        typer.Option("--skew", metavar="S", min=0, help="The k-th adapter's share goes as 1/k^S [default: 1]."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="[default: 42]")] = None,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Keep the generated trace.")] = None,
    policy: Annotated[str, typer.Option("--policy", metavar="lru|lfu|gdsf|all", help="Who leaves.")] = "all",
    adapter_memory: Annotated[
        str, typer.Option("--adapter-memory", metavar="SIZE", help="VRAM for adapters.")
    ] = "16GiB",
    host_memory: Annotated[str, typer.Option("--host-memory", metavar="SIZE", help="Host RAM for adapters.")] = "64GiB",
    rank: Annotated[str, typer.Option("--rank", metavar="N,N…", help="Given to the adapters in turn.")] = "8,16,32,64",
    bytes_per_rank: Annotated[
        str, typer.Option("--bytes-per-rank", metavar="SIZE", help="Of an adapter; for 8B parameters in 16 bits 5MiB.")
    ] = "5MiB",
    host_bandwidth: Annotated[
        str, typer.Option("--host-bandwidth", metavar="SIZE", help="Host RAM to VRAM, a second.")
    ] = "20GiB",
    disk_bandwidth: Annotated[
        str, typer.Option("--disk-bandwidth", metavar="SIZE", help="Disk to host RAM, a second.")
    ] = "2GiB",
    tokens_per_second: Annotated[
        float, typer.Option("--tokens-per-second", metavar="R", min=0.001, help="Of one answer.")
    ] = 60.0,
    patience: Annotated[
        float,
        typer.Option("--patience", metavar="SECONDS", min=0, help="Before busy adapters are drained."),
    ] = 5.0,
    as_json: Json = False,
) -> None:
    """Replay a trace of requests under each eviction policy, and tell hits, bytes moved and waits.

    Nothing is served: the policies' own code runs over two tiers, adapter memory and host RAM, with the disk below.

    \b
    Examples:
      manylora simulate --generate zipf --skew 1.2 --adapters 1000
      manylora simulate requests.jsonl --adapter-memory 24GiB --policy all
    """
    # Imported late: start-up stays light.
    from manylora.tiers.simulation import Node
    from manylora.tiers.simulation import simulate as replay

    made_up = {"adapters": adapters, "requests": requests, "rate": rate, "skew": skew, "seed": seed}
    found = _requests(trace, generate, {name: value for name, value in made_up.items() if value is not None}, save)
    node = Node(
        adapter_memory_bytes=_size("--adapter-memory", adapter_memory),
        host_memory_bytes=_size("--host-memory", host_memory),
        lora_ranks=_ranks(rank),
        bytes_per_lora_rank=_size("--bytes-per-rank", bytes_per_rank),
        host_bytes_per_s=_size("--host-bandwidth", host_bandwidth),
        disk_bytes_per_s=_size("--disk-bandwidth", disk_bandwidth),
        decode_tokens_per_s=tokens_per_second,
        patience_s=patience,
    )
    _tell(found, node, [replay(found, node, name) for name in _policies(policy)], as_json)


def _requests(
    trace: Path | None, generate: str | None, made_up: dict[str, Any], save: Path | None
) -> Sequence[Request]:
    """The trace that is read, or made up."""
    from manylora.tiers.traces import GENERATORS, Recipe, read_trace, write_trace

    if (trace is None) == (generate is None):
        raise InvalidInput("there is no trace" if trace is None else "there are two traces", "give TRACE or --generate")
    if trace is not None:
        flags = [f"--{name}" for name in (*made_up, *(["save"] if save else []))]
        if flags:
            raise InvalidInput(f"{flags[0]} is for a generated trace", "leave it out, or give --generate for TRACE")
        return read_trace(trace)
    if generate not in GENERATORS:
        raise InvalidInput(f"'{shown(generate or '')}' makes no trace", f"choose from {', '.join(GENERATORS)}")
    found = GENERATORS[generate](Recipe(**made_up))
    if save is not None:
        write_trace(save, found)
    return found


def _policies(name: str) -> list[str]:
    from manylora.tiers.eviction import POLICIES

    if name != "all" and name not in POLICIES:
        raise InvalidInput(f"'{shown(name)}' is no policy", f"choose from {', '.join(POLICIES)}, all")
    return list(POLICIES) if name == "all" else [name]


def _size(flag: str, text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(KiB|MiB|GiB|)", text)
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size <= 0:
        raise InvalidInput(
            f"{flag} '{shown(text)}' is not a size", "write one such as 16GiB, 512MiB or a number of bytes"
        )
    return size


def _ranks(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,4}", part) for part in parts):
        raise InvalidInput(f"--rank '{shown(text)}' cannot be used", "write one or several, such as 8,16,32,64")
    return tuple(int(part) for part in parts)


def _tell(requests: Sequence[Request], node: Node, outcomes: list[Outcome], as_json: bool) -> None:
    from manylora.tiers.simulation import adapter_sizes

    sizes, seconds = adapter_sizes(requests, node), requests[-1].time - requests[0].time
    if as_json:
        trace = {
            "requests": len(requests),
            "adapters": len(sizes),
            "adapter_bytes": sum(sizes.values()),
            "seconds": seconds,
        }
        print_json({"trace": trace, "policies": [views.simulation_view(outcome) for outcome in outcomes]})
        return
    total = bytes_text(sum(sizes.values()))
    say(f"{len(requests)} requests over {seconds:.0f} s for {len(sizes)} adapters of {total} in all")
    header = ("POLICY", "VRAM HITS", "HOST HITS", "TO VRAM", "FROM DISK", "EVICTIONS", "RELOADS", "WAIT", "P50", "P99")
    print_table((*header, "MAX"), [_row(outcome) for outcome in outcomes])


def _row(outcome: Outcome) -> tuple[str, ...]:
    waits = (outcome.mean_s, outcome.percentile_s(0.5), outcome.percentile_s(0.99), outcome.percentile_s(1.0))
    return (
        outcome.policy,
        f"{outcome.vram.hit_rate:.1%}",
        f"{outcome.host.hit_rate:.1%}",
        bytes_text(outcome.vram.bytes_in),
        bytes_text(outcome.host.bytes_in),
        str(outcome.vram.evictions),
        str(outcome.vram.reloads),
        *(f"{wait_s * 1000:.1f} ms" for wait_s in waits),
    )
