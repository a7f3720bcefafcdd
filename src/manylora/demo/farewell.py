"""What `manylora demo --keep` prints before it waits: how to talk to the running endpoint, and how to push to it."""

from __future__ import annotations

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
manylora adapter list
manylora adapter push FOLDER {tenant}/NAME"""


def snippets(url: str, key: str, home: Path) -> tuple[str, str, str]:
    """A curl command, a program with the OpenAI client, and the commands that reach the registry of this run."""
    values = {"url": url, "key": key, "model": "pirate", "question": asks.SECOND_QUESTION}
    return _CURL.format(**values), _PYTHON.format(**values), _PUSH.format(home=home, tenant=asks.TENANT)


def show(out: Transcript, url: str, key: str, home: Path, models: Sequence[str]) -> None:
    """Print the models and the three snippets."""
    out.act("It stays up; Ctrl-C stops it and removes this run's registry")
    out.line(f"models of this key: {', '.join(models)}")
    for title, code in zip(("curl", "Python", "this registry in another shell"), snippets(url, key, home), strict=True):
        out.line("")
        out.code(title, code)
