"""The path at which a proxy shows the server, taken off where the proxy has not done it."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware: below `root_path` there is what is at the top, and at the top too."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.root_path and scope["path"].startswith(f"{self.root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self.root_path)}
        await self.app(scope, receive, send)
