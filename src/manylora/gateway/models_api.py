"""`/v1/models`: the base model and the adapters that the caller may use. Knows nothing of how they are served."""

from __future__ import annotations

from datetime import datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.gateway.admission import Admission, Caller, stickiness
from manylora.gateway.exchange import exchange_of

OWNER = "manylora"


class ModelsApi:
    """Cards in the shape of OpenAI's list, with vLLM's `root` and `parent`. `root` is a version, never a path."""

    def __init__(self, admission: Admission, base_model_name: str, started_at: datetime) -> None:
        self._admission = admission
        self._base_model_name = base_model_name
        self._started_at = started_at

    async def list(self, request: Request) -> Response:
        caller = await self._caller(request)
        cards = [self._base_card()]
        for info in await self._admission.visible(caller):
            root = f"{info.name}@v{info.live}" if info.live else str(info.name)
            cards.append(self._card(str(info.name), info.name.tenant, info.created_at, root))
        return JSONResponse({"object": "list", "data": cards})

    async def show(self, request: Request) -> Response:
        """One card, under the name asked for: a name, a number or an alias, as in a request."""
        caller = await self._caller(request)
        asked: str = request.path_params["model"]
        target = await self._admission.target(
            caller, asked, lambda: stickiness(caller.principal.tenant, request.headers, {})
        )
        if target.version is None:
            return JSONResponse(self._base_card())
        ref = target.version.ref
        return JSONResponse(self._card(asked, ref.adapter.tenant, target.version.created_at, str(ref)))

    async def _caller(self, request: Request) -> Caller:
        exchange = exchange_of(request.scope)
        exchange.route = "/v1/models"
        caller = await self._admission.authenticate(request.headers)
        exchange.tenant, exchange.key_id = caller.principal.tenant, caller.principal.key_id
        return caller

    def _base_card(self) -> dict[str, object]:
        card = self._card(self._base_model_name, OWNER, self._started_at, self._base_model_name)
        return {**card, "parent": None}

    def _card(self, name: str, owner: str, created_at: datetime, root: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": int(created_at.timestamp()),
            "owned_by": owner,
            "root": root,
            "parent": self._base_model_name,
        }
