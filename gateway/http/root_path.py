"""The path under which a proxy shows the server is removed here, if the proxy has not removed it."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware: every route answers with and without the prefix `root_path`."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.root_path and scope["path"].startswith(f"{self.root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self.root_path)}
        await self.app(scope, receive, send)
