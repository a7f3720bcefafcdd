"""What `manylora demo --keep` prints before it waits: how to talk to the running endpoint, and how to push to it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from manylora.demo import asks
from manylora.demo.transcript import Transcript

_CURL = """\
curl {url}/chat/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "{question}"}}], "temperature": 0}}'"""

_PYTHON = """\
from openai import OpenAI

client = OpenAI(base_url="{url}", api_key="{key}")
answer = client.chat.completions.create(
    model="{model}", messages=[{{"role": "user", "content": "{question}"}}], temperature=0
)
print(answer.choices[0].message.content)"""

_PUSH = """\
export MANYLORA_HOME={home}
{manylora} adapter list
{manylora} adapter push FOLDER {tenant}/NAME"""


def manylora_command(executable: Path, working_folder: Path, on_path: str | None) -> str:
    """How this very program is called in another shell: by name where that finds it, else by the shorter path.

    `executable` is what runs now, and `on_path` what a shell finds under the name `manylora`.
    """
    if on_path is not None and Path(on_path).resolve() == executable.resolve():
        return "manylora"
    if not os.access(executable, os.X_OK) or executable.suffix == ".py":
        return f"{shlex.quote(sys.executable)} -m manylora"
    relative = os.path.relpath(executable, working_folder)
    return shlex.quote(min(str(executable), relative, key=len))


def snippets(url: str, key: str, home: Path, manylora: str) -> tuple[str, str, str]:
    """A curl command, a program with the OpenAI client, and the commands that reach the registry of this run."""
    values = {"url": url, "key": key, "model": "pirate", "question": asks.SECOND_QUESTION}
    return (
        _CURL.format(**values),
        _PYTHON.format(**values),
        _PUSH.format(home=shlex.quote(str(home)), tenant=asks.TENANT, manylora=manylora),
    )


def show(out: Transcript, url: str, key: str, home: Path, models: Sequence[str]) -> None:
    """Print the models and the three snippets."""
    manylora = manylora_command(Path(sys.argv[0]).absolute(), Path.cwd(), shutil.which("manylora"))
    out.act("It stays up; Ctrl-C stops it and removes this run's registry")
    out.line(f"models of this key: {', '.join(models)}")
    for title, code in zip(
        ("curl", "Python", "this registry in another shell"), snippets(url, key, home, manylora), strict=True
    ):
        out.line("")
        out.code(title, code)
