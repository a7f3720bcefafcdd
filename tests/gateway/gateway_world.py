"""A running gateway with everything around it, and clients for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
from gateway_fakes import FakeCatalog, FakeEngine, ThreadedServer

from manylora.gateway.server import GatewayServer
from manylora.settings import Settings
from manylora.tiers.disk import DiskTier

KEY = "sk-acme-0123456789"
OTHER_KEY = "sk-globex-0123456789"
ADMIN_KEY = "sk-admin-0123456789"


class ThreadedGateway(ThreadedServer, GatewayServer):
    pass


@dataclass
class World:
    """One gateway and everything around it."""

    url: str
    catalog: FakeCatalog
    engine: FakeEngine
    disk_tier: DiskTier
    settings: Settings
    client: httpx.Client

    def post(self, path: str = "/v1/chat/completions", key: str | None = KEY, **options: Any) -> httpx.Response:
        headers = ({"authorization": f"Bearer {key}"} if key else {}) | options.pop("headers", {})
        return self.client.post(path, headers=headers, **options)

    def get(self, path: str, key: str | None = KEY, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=({"authorization": f"Bearer {key}"} if key else {}) | headers)

    def chat(self, model: str, key: str = KEY, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.post(key=key, json=body, headers=headers)
