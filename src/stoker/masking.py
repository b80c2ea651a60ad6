"""What must not be shown: passwords in addresses."""

import re
from typing import Final

# Up to the last `@` in front of a query: a password may hold one that nobody escaped.
_IN_ADDRESS: Final = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^/@:?#\s]*):[^?\s]*@", re.IGNORECASE)
_IN_QUERY: Final = re.compile(r"([?&]\w*password=)[^&\s]*", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """The text, with no password in any address in it."""
    if "://" not in text:
        return text
    return _IN_QUERY.sub(r"\1…", _IN_ADDRESS.sub(r"\1@", text))
