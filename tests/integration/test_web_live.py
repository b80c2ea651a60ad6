"""Lists of jobs that are open: they change by themselves, and one look serves everybody who has the same one open."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from stoker.queue.fields import JobSpec
from stoker.queue.store import Store
from stoker.web.answers import Page, cursor_of
from stoker.web.auth.key_file import User
from stoker.web.pages.views import Listing
from stoker.web.sse import live
from tests.support.api_site import ApiSite
from tests.support.asgi_page import AsgiPage


class Site(ApiSite):
    """With the live pages."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.app.include_router(live.router)
        token = self.keys.add("phone", "operator")
        self.user = User(token.role, token.name, None, token.id)

    def page(self, address: str) -> AsgiPage:
        return AsgiPage(self.app, address, self.user)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with closing(Site(tmp_path)) as made:
        yield made


def newest(page: AsgiPage) -> str:
    return page.heard("list")[-1]


def test_open_job_list_is_updated(site: Site) -> None:
    async def story() -> None:
        [first] = site.store.jobs.submit([JobSpec(command="true", name="first")])
        async with site.page("/live/jobs?state=queued") as page:
            await page.until(lambda: page.heard("list"))
            assert f'id="row-{first}"' in newest(page)
            [second] = site.store.jobs.submit([JobSpec(command="true", name="second")])
            site.look()
            await page.until(lambda: f'id="row-{second}"' in newest(page), "the new job")
            site.store.jobs.cancel([first])
            site.look()
            await page.until(lambda: f'id="row-{first}"' not in newest(page), "the end of the cancelled one")
            assert f'id="row-{second}"' in newest(page)

    asyncio.run(story())


def test_unchanged_sections_are_not_sent_again(site: Site) -> None:
    async def story() -> None:
        [queued] = site.store.jobs.submit([JobSpec(command="true")])
        async with site.page("/live/jobs?state=held") as page, site.page("/live/jobs") as all_of_them:
            await page.until(lambda: page.heard("list") and all_of_them.heard("list"))
            site.store.jobs.hold([queued])
            site.look()
            await page.until(lambda: len(page.heard("list")) == 2)
            site.store.jobs.submit([JobSpec(command="true", name="another")])
            site.look()
            await all_of_them.until(lambda: "another" in newest(all_of_them))
            assert len(page.heard("list")) == 2

    asyncio.run(story())


def test_older_page_of_a_list_does_not_shift(site: Site) -> None:
    async def story() -> None:
        old, new = site.store.jobs.submit([JobSpec(command="true", name=name) for name in ("old", "new")])
        last = site.store.jobs.get(new)
        async with site.page(f"/live/jobs?cursor={cursor_of((last.submitted, last.position))}") as page:
            await page.until(lambda: page.heard("list"))
            assert (f'id="row-{old}"' in newest(page), f'id="row-{new}"' in newest(page)) == (True, False)
            site.store.jobs.submit([JobSpec(command="true", name="added")])
            site.store.jobs.cancel([old])
            site.look()
            await page.until(lambda: len(page.heard("list")) == 2)
            assert f'id="row-{old}"' in newest(page)
            assert "added" not in newest(page)

    asyncio.run(story())


def test_equal_lists_share_one_query(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Listing] = []
    look = Listing.read

    def counted(self: Listing, store: Store) -> Page:
        looked.append(self)
        return look(self, store)

    async def story() -> None:
        pages = [site.page("/live/jobs") for _ in range(20)] + [site.page("/live/jobs?tag=a")]
        for page in pages:
            await page.__aenter__()
        await pages[0].until(lambda: all(page.heard("list") for page in pages))
        for page in pages:
            await page.__aexit__(None, None, None)
        assert sorted(listing.q for listing in looked) == ["", "tag:a"]

    monkeypatch.setattr(Listing, "read", counted)
    asyncio.run(story())


def test_invalid_cursor_is_refused_before_the_stream_starts(site: Site) -> None:
    answer: Any = site.client().get("/live/jobs?cursor=nonsense")
    assert answer.status_code == 422
    assert "invalid cursor" in answer.json()["errors"][0]["detail"]


def told_together(page: AsgiPage) -> list[list[Any]]:
    blocks = page.body.decode().split("\n\n")[:-1]
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block.startswith("data: ")]


def test_merged_stream_contains_several_streams_and_reports_missing_ones(site: Site) -> None:
    async def story() -> None:
        [first] = site.store.jobs.submit([JobSpec(command="true", name="first")])
        wanted = ["/live/jobs?state=queued", f"/live/jobs/{first}", "/api/v1/jobs", "/live/jobs/00000000", "//x/live"]
        async with site.page(f"/live/many?{urlencode([('on', one) for one in wanted])}") as page:

            def of(number: int, name: str) -> list[str]:
                return [data for at, event, data, _ in told_together(page) if (at, event) == (number, name)]

            await page.until(lambda: of(0, "list") and of(1, "summary") and of(2, "") and of(3, "gone") and of(4, ""))
            assert first in of(0, "list")[-1]
            # Only what is live, and only of this page.
            assert (of(2, ""), of(4, "")) == (["404"], ["404"])
            site.store.jobs.cancel([first])
            site.look()
            await page.until(
                lambda: first not in of(0, "list")[-1] and "cancelled" in of(1, "summary")[-1], "both news"
            )
            assert not page.is_complete
        assert site.snapshot_cache.viewers == 0

    asyncio.run(story())


@pytest.mark.parametrize("count", [0, 33])
def test_merged_stream_of_none_or_too_many_is_refused(site: Site, count: int) -> None:
    address = f"/live/many?{urlencode([('on', '/live')] * count)}"
    assert site.client().get(address).status_code == 422
