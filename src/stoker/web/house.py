"""What every handler of a request may need, in one place; and who asks."""

import msgspec
from starlette.requests import HTTPConnection

from stoker.web.board import Board
from stoker.web.config import Config
from stoker.web.desk import Desk
from stoker.web.keys import Keys
from stoker.web.visitor import Visitor


class House(msgspec.Struct, frozen=True):
    config: Config
    desk: Desk
    board: Board
    keys: Keys


def house_of(request: HTTPConnection) -> House:
    house: House = request.app.state.house
    return house


def visitor_of(request: HTTPConnection) -> Visitor:
    """Who asks: the guard has let nobody in without."""
    visitor: Visitor = request.state.visitor
    return visitor
