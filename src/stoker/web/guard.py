"""The guard: everything that a request passes before the page sees it."""

from collections.abc import Callable

from starlette.types import ASGIApp

from stoker.web.config import Config
from stoker.web.gate.access_log import AccessLog
from stoker.web.gate.body_limit import DeclaredSize, WholeBody
from stoker.web.gate.compression import compressed
from stoker.web.gate.crossing import Crossing
from stoker.web.gate.entrance import Entrance
from stoker.web.gate.headers import SecurityHeaders
from stoker.web.gate.hosts import Hosts
from stoker.web.keys import Keys


def guarded(app: ASGIApp, config: Config, keys: Keys, log: Callable[[str], None]) -> ASGIApp:
    """`app` behind the gate; `log` is given a line for every request."""
    # From the innermost: a body is collected last, so that nobody's is kept who has not been let in.
    app = WholeBody(app, config)
    # Outside of the entrance, which may end a stream: its last bytes belong to what is compressed.
    app = compressed(Entrance(app, config, keys))
    app = Crossing(app, config)
    app = DeclaredSize(app, config)
    app = Hosts(app, config)
    app = SecurityHeaders(app, config)
    return AccessLog(app, log)
