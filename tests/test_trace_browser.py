"""The page of ``phalanx trace`` in a real browser."""

import os
import shutil

import pytest
import trace_files as made

from phalanx import cli

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
SHOTS = os.environ.get("PHALANX_SCREENSHOTS")  # a directory, to look at them

pytestmark = [
    pytest.mark.skipif(not BROWSER, reason="no chromium here: apt-get install chromium"),
    # A pipe of its driver is closed by the interpreter when it ends, with a warning.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
playwright = pytest.importorskip(
    "playwright.sync_api", reason='needs playwright: pip install "phalanx[browser]"'
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A page of three ranks: rank 2 is late for the second collective; a message; ranges."""
    directory = tmp_path_factory.mktemp("small")
    for rank in range(3):
        late = 30_000_000 if rank == 2 else 0
        slots = [
            made.site("train.py:88 in step"),
            made.site("model.py:12 in forward"),
            made.site("exchange.py:5 in pass_on"),
            made.group(1, "world", rank, 3),
            made.stretch("epoch 0", 1, 90_000_000),
            made.operation("broadcast", 1, 1_000_000 + rank, 9_000_000, root=0, site=1),
            made.operation(
                "all_reduce", 2, 20_000_000 + late, 60_000_000, bytes=4_200_000, shape=1_050_000
            ),
        ]
        if rank == 0:
            slots.append(
                made.operation("send", 1, 65_000_000, 70_000_000, root=1, site=2, bytes=800)
            )
        if rank == 1:
            slots.append(
                made.operation("recv", 1, 66_000_000, 80_000_000, source=0, site=2, bytes=800)
            )
        made.write(directory, rank, 3, slots)
    assert cli.main(["trace", str(directory)]) == 0
    return directory / "trace.html"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A page of 100,000 operations on eight ranks."""
    directory = tmp_path_factory.mktemp("large")
    made.many(directory, 8, 12_500)
    assert cli.main(["trace", str(directory)]) == 0
    return directory / "trace.html"


@pytest.fixture
def visit(browser):
    """Open a page and fail if it complains of anything, then or later."""
    complaints = []
    context = browser.new_context(viewport={"width": 1400, "height": 800}, offline=True)

    def open_page(path, **media):
        page = context.new_page()
        page.emulate_media(reduced_motion="reduce", **media)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_function("window.timeline && timeline.frames > 0")
        return page

    yield open_page
    context.close()
    assert complaints == []


def settle(page):
    """Wait until all that was asked for is drawn."""
    page.wait_for_function("!timeline.frame")


def shoot(page, name):
    if SHOTS:
        page.wait_for_timeout(100)
        page.screenshot(path=f"{SHOTS}/{name}.png")


def event(page, op, rank):
    """Return the place of the first such operation in the model."""
    return page.evaluate(
        "([op, rank]) => model.op.findIndex((code, i) =>"
        " model.ops[code] === op && model.rank[i] === rank)",
        [op, rank],
    )


def point_at(page, index):
    at = page.evaluate("(i) => timeline.locate(i)", index)
    page.mouse.move(at["x"], at["y"])
    return at


def span(page):
    return page.evaluate("timeline.view.end - timeline.view.start")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_loads(visit, small, scheme):
    page = visit(small, color_scheme=scheme)
    assert page.locator("#title").inner_text() == small.parent.name
    assert "3 ranks" in page.locator("#facts-line").inner_text()
    panel = page.locator("#panel").inner_text()
    for fact in ("Time lost to waiting", "Slowest operations", "Bytes per group", "rank 2"):
        assert fact in panel
    legend = page.locator("#legend").inner_text()
    for op in ("all_reduce", "broadcast", "send", "recv"):
        assert op in legend
    ground = page.evaluate("timeline.paint.ground")
    assert (int(ground[1:3], 16) < 128) == (scheme == "dark")
    shoot(page, f"small-{scheme}")


def colours(page):
    """Count the different colours of the timeline's pixels."""
    return page.evaluate(
        "() => { const c = timeline.canvas;"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " return new Set(new Uint32Array(d.buffer)).size; }"
    )


def test_a_narrow_window(visit, small):
    page = visit(small)
    page.set_viewport_size({"width": 420, "height": 800})
    settle(page)
    shoot(page, "narrow")
    boxes = [page.locator(name).bounding_box() for name in (".brand", "nav", "#search")]
    for box in boxes:
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 420
    brand, nav, search = boxes
    assert brand["x"] + brand["width"] <= nav["x"]
    assert max(brand["y"] + brand["height"], nav["y"] + nav["height"]) <= search["y"]


def test_something_is_drawn(visit, small):
    page = visit(small)
    assert colours(page) > 20


def test_wheel_zooms_where_the_pointer_is(visit, small):
    page = visit(small)
    index = event(page, "all_reduce", 1)
    at = point_at(page, index)
    before = span(page)
    under = page.evaluate("(x) => timeline.moment(x)", at["x"])  # the canvas begins at the left
    page.mouse.wheel(0, -400)
    page.wait_for_function(f"timeline.view.end - timeline.view.start < {before} * 0.7")
    settle(page)
    still = page.evaluate("(x) => timeline.moment(x)", at["x"])
    assert still == pytest.approx(under, abs=span(page) / 500)  # less than two pixels away
    page.mouse.wheel(0, 2000)
    page.mouse.wheel(0, 2000)
    page.wait_for_function(f"timeline.view.end - timeline.view.start >= {before} * 0.999")


def test_keys_zoom_and_move(visit, small):
    page = visit(small)
    before = span(page)
    page.keyboard.press("w")
    page.keyboard.press("w")
    assert span(page) == pytest.approx(before * 0.49)
    start = page.evaluate("timeline.view.start")
    page.keyboard.press("d")
    assert page.evaluate("timeline.view.start") > start
    page.keyboard.press("a")
    assert page.evaluate("timeline.view.start") == pytest.approx(start)
    page.keyboard.press("0")
    assert span(page) == before


def test_dragging_moves(visit, small):
    page = visit(small)
    page.keyboard.press("w")
    start = page.evaluate("timeline.view.start")
    page.mouse.move(700, 400)
    page.mouse.down()
    page.mouse.move(600, 400, steps=4)
    page.mouse.up()
    assert page.evaluate("timeline.view.start") > start
    assert page.locator("#selection").is_hidden()  # it was no click


def test_hovering_tells_the_facts(visit, small):
    page = visit(small)
    point_at(page, event(page, "all_reduce", 0))
    page.wait_for_selector("#tooltip:not([hidden])")
    text = page.locator("#tooltip").inner_text()
    for fact in (
        "all_reduce",
        "#2",
        "world (3 ranks)",
        "float32 [1050000]",
        "4.20 MB",
        "SUM",
        "train.py:88 in step",
        "wait 30.0 ms",
        "transfer 10.0 ms",
        "rank 2 came last, 30.0 ms after the first",
    ):
        assert fact in text, fact
    shoot(page, "hover")
    point_at(page, event(page, "send", 0))
    page.wait_for_function("document.getElementById('tooltip').innerText.includes('to')")
    assert "rank 1, tag 0" in page.locator("#tooltip").inner_text()
    page.mouse.move(700, 780)
    page.wait_for_selector("#tooltip", state="hidden")


def test_clicking_keeps_the_operation(visit, small):
    page = visit(small)
    at = point_at(page, event(page, "all_reduce", 2))
    page.mouse.click(at["x"], at["y"])
    text = page.locator("#selection").inner_text()
    assert "this rank came last" in text
    assert "Arrivals" in text
    assert "+30.0 ms" in text
    shoot(page, "selected")
    page.keyboard.press("Escape")
    assert page.locator("#selection").is_hidden()


def test_search_finds_a_call_site_and_jumps(visit, small):
    page = visit(small)
    page.keyboard.press("/")
    page.keyboard.type("model.py:12")
    assert page.locator("#hits").inner_text() == "3 hits"
    page.keyboard.press("Enter")
    assert page.locator("#hits").inner_text() == "1 of 3"
    assert "broadcast" in page.locator("#selection").inner_text()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.locator("#hits").inner_text() == "3 of 3"
    page.keyboard.press("Enter")
    assert page.locator("#hits").inner_text() == "1 of 3"
    shoot(page, "search")
    for query, hits in (("send", "1 hit"), ("world", "8 hits"), ("#2 reduce", "3 hits")):
        page.locator("#query").fill(query)
        assert page.locator("#hits").inner_text() == hits
    page.locator("#query").fill("nowhere.py")
    assert page.locator("#hits").inner_text() == "no hits"
    page.keyboard.press("Escape")
    assert page.locator("#query").input_value() == ""


def test_the_summary_leads_to_the_timeline(visit, small):
    page = visit(small)
    before = span(page)
    page.locator("#panel .entry").first.click()
    assert span(page) <= before
    assert "all_reduce" in page.locator("#selection").inner_text()
    page.locator("#toggle-panel").click()
    assert page.locator("#panel").is_hidden()


def test_the_legend_shows_an_operation_alone(visit, small):
    page = visit(small)
    page.locator("#legend button", has_text="send").click()
    assert page.evaluate("timeline.lit.reduce((a, b) => a + b, 0)") == 1
    page.locator("#legend button", has_text="send").click()
    assert page.evaluate("timeline.lit") is None


def test_the_scheme_can_be_chosen(visit, small):
    page = visit(small, color_scheme="light")
    before = page.evaluate("timeline.paint.ground")
    page.locator("#scheme").click()
    assert page.evaluate("timeline.paint.ground") != before


def test_a_hundred_thousand_operations(visit, large):
    page = visit(large)
    assert "100,000 operations" in page.locator("#facts-line").inner_text()
    shoot(page, "large")
    page.mouse.move(700, 400)
    times = []
    for _ in range(12):
        frames = page.evaluate("timeline.frames")
        page.mouse.wheel(0, -300)
        page.wait_for_function(f"timeline.frames > {frames}")
        times.append(page.evaluate("timeline.frameTime"))
    shoot(page, "large-zoomed")
    print(f"\nframes of 100,000 operations, in ms: {[round(time, 1) for time in times]}")
    assert span(page) < 0.1 * page.evaluate("model.length_ns")
    assert colours(page) > 20
    page.locator("#query").fill("step3")
    assert page.locator("#hits").inner_text() == "20,000 hits"
    page.keyboard.press("Enter")
    point_at(page, page.evaluate("timeline.selected"))
    page.wait_for_selector("#tooltip:not([hidden])")
    assert "train.py:13 in step3" in page.locator("#tooltip").inner_text()


def test_what_is_missing_is_told(visit, tmp_path):
    """A rank without a record, one that never came, an operation that never ended."""
    start = [made.site("train.py:88 in step"), made.group(1, "world", 0, 3)]
    done = made.operation("barrier", 1, 1_000, 5_000)
    made.write(tmp_path, 0, 3, [*start, done, made.operation("all_gather", 2, 9_000, 0)])
    made.write(tmp_path, 1, 3, [*start, done])
    assert cli.main(["trace", str(tmp_path)]) == 0
    page = visit(tmp_path / "trace.html")
    assert page.locator("#problems").inner_text() == "no record of rank 2"
    assert "rank 1 never came on world; others waited" in page.locator("#panel").inner_text()
    point_at(page, event(page, "barrier", 0))
    page.wait_for_selector("#tooltip:not([hidden])")
    assert "wait unknown" in page.locator("#tooltip").inner_text()
    page.evaluate("(i) => timeline.select(i)", event(page, "all_gather", 0))
    text = page.locator("#selection").inner_text()
    assert "rank 1 never came; 1 of 3 ranks did" in text
    assert "not finished" in text


def test_only_ranges(visit, tmp_path):
    made.write(tmp_path, 0, 1, [made.stretch("outer", 10, 900), made.stretch("inner", 20, 90)])
    assert cli.main(["trace", str(tmp_path)]) == 0
    page = visit(tmp_path / "trace.html")
    page.locator("#query").fill("inner")
    assert page.locator("#hits").inner_text() == "1 hit"
    assert "null" not in page.locator("#panel").inner_text()
