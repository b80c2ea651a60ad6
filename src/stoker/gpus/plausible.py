"""Values that a driver reported, believed only when they can be true."""

from stoker.gpus.model import Maybe, Unknown

# Above every board sold, below every blank value that drivers have leaked (2**32 - 1 mW is 4,294,967 W).
MOST_WATTS = 10_000.0
# Driver reports include reserved memory in "used" in some versions and not in "total": allow rounding, no more.
MEMORY_SLACK = 1.02
COLDEST, HOTTEST = -40.0, 200.0


def fraction(percent: float) -> Maybe[float]:
    """A percentage as a fraction of 1."""
    if 0 <= percent <= 100:
        return percent / 100
    return Unknown(f"the driver reported {percent:g} %, which cannot be")


def memory_used(used: int, total: Maybe[int]) -> Maybe[int]:
    if used < 0 or (not isinstance(total, Unknown) and used > total * MEMORY_SLACK):
        return Unknown(f"the driver reported {used} bytes in use, more than the GPU has")
    return used


def memory_total(total: int) -> Maybe[int]:
    if 0 < total < 2**50:
        return total
    return Unknown(f"the driver reported a memory of {total} bytes, which cannot be")


def watts(value: float) -> Maybe[float]:
    if 0 <= value <= MOST_WATTS:
        return value
    return Unknown(f"the driver reported {value:g} W, which cannot be")


def celsius(value: float) -> Maybe[float]:
    if COLDEST <= value <= HOTTEST:
        return value
    return Unknown(f"the driver reported {value:g} °C, which cannot be")
