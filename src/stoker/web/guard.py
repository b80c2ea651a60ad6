"""The guard: everything that a request passes before the page sees it."""

from collections.abc import Callable

from starlette.types import ASGIApp

from stoker.web.auth.access_log import AccessLog
from stoker.web.auth.authentication import Authentication
from stoker.web.auth.body_limit import DeclaredSize, WholeBody
from stoker.web.auth.compression import compressed
from stoker.web.auth.csrf import CsrfProtection
from stoker.web.auth.headers import SecurityHeaders
from stoker.web.auth.hosts import Hosts
from stoker.web.config import Config
from stoker.web.keys import Keys


def guarded(app: ASGIApp, config: Config, keys: Keys, log: Callable[[str], None]) -> ASGIApp:
    """`app` behind the gate; `log` is given a line for every request."""
    # From the innermost: a body is collected last, so that nobody's is kept who has not been let in.
    app = WholeBody(app, config)
    # Outside of the entrance, which may end a stream: its last bytes belong to what is compressed.
    app = compressed(Authentication(app, config, keys))
    app = CsrfProtection(app, config)
    app = DeclaredSize(app, config)
    app = Hosts(app, config)
    app = SecurityHeaders(app, config)
    return AccessLog(app, log)
