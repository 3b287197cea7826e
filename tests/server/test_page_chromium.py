"""The page in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from selenium.webdriver.common.keys import Keys
from tests.server.browser import CHROMIUM, DRIVER, Browser, chromium, facts, text_of
from tests.server.gate import gate, slowed
from tests.server.joined import meanwhile
from tests.server.running import MakeServer, Running

from loadproof import LLM, SamplingParams

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver: Debian's chromium-driver"
)
SIZES = [(1280, 800), (390, 844)]
BLOCKS = """
return [["held", "cached", "blank"].map(id => Number(document.getElementById(id).textContent)),
        [...document.querySelectorAll("#bar span")].map(one => Number(getComputedStyle(one).flexGrow))];
"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(window: Browser, server: Running, no_leak: None) -> Iterator[Browser]:
    """The page of the common server; nothing may be amiss in its console afterwards."""
    window.open(server.url)
    yield window
    assert window.complaints() == []


def test_an_answer_and_what_is_said_of_it(page: Browser, server: Running, reference: LLM) -> None:
    page.set(seed=7, max_tokens=12, temperature=1)
    answer = page.ask("Hello there")
    conversation = [{"role": "user", "content": "Hello there"}]
    (expected,) = reference.chat(
        conversation, SamplingParams(seed=7, max_tokens=12, temperature=1), use_tqdm=False
    )
    (completion,) = expected.outputs
    assert text_of(answer) == completion.text
    shown = facts(answer)
    assert shown["Seed"] == "7"
    assert shown["Fingerprint"] == server.llm.system_fingerprint
    assert shown["Prompt"].startswith(f"{len(expected.prompt_token_ids)} tokens, ")
    assert shown["Answer"] == f"{len(completion.token_ids)} tokens"


def test_a_drawn_seed_is_shown_and_replayed(page: Browser) -> None:
    page.set(max_tokens=24, temperature=1.5)
    answer = page.ask("Draw one")
    seed, before = facts(answer)["Seed"], text_of(answer)
    assert seed.isdecimal()
    num = facts(answer)["Answer"].removesuffix(" tokens")
    assert page.replay(answer) == f"The same to the last token: {num} of {num} tokens."
    assert "same" in str(answer.find_element("css selector", ".verdict").get_property("className"))
    assert (facts(answer)["Seed"], text_of(answer)) == (seed, before)


def test_replays_under_load_are_the_same(page: Browser, server: Running) -> None:
    page.set(max_tokens=40, temperature=1)
    answer = page.ask("Alone at first")
    other = server.http()

    def load() -> None:
        body = {"prompt": [[2, 3, 4]] * 6, "max_tokens": 30, "temperature": 1}
        assert other.post("/v1/completions", json=body).status_code == 200

    with meanwhile(load):
        verdicts = [page.replay(answer) for _ in range(3)]
    assert all(verdict.startswith("The same to the last token") for verdict in verdicts)


def test_a_replay_that_differs_is_said_to(page: Browser) -> None:
    page.set(max_tokens=32, temperature=2)
    answer = page.ask("Once")
    before = text_of(answer)
    page.script(
        """const fetched = window.fetch;
        window.fetch = (url, options) => {
          if (options.body) options.body = options.body.replace(/"seed":(\\d+)/, '"seed":1$1');
          return fetched(url, options);
        };"""
    )
    verdict = page.replay(answer)
    assert verdict.startswith("Different from token ")
    assert answer.find_element("css selector", ".other").text != before
    assert text_of(answer) == before


def test_a_chat_of_several_turns_reuses_its_beginning(page: Browser, server: Running) -> None:
    page.set(max_tokens=6, temperature=0)
    first = "a first message that is long enough to fill some blocks of the cache"
    page.ask(first)
    answer = page.ask("and a second one")
    shown = facts(answer)["Prompt"]
    prompt, cached = (int(word) for word in shown.split() if word.isdecimal())
    assert 0 < cached < prompt
    assert prompt > len(first)
    assert [turn.text.split("\n")[0] for turn in page.all(".turn h3")] == ["You", "Answer"] * 2
    page.find("#clear").click()
    assert page.all(".turn") == []
    assert page.find("#welcome").is_displayed()
    assert int(facts(page.ask("and a second one"))["Prompt"].split()[0]) < prompt


def test_settings_go_into_the_request(page: Browser) -> None:
    sent = """window.sent = [];
        const fetched = window.fetch;
        window.fetch = (url, options) => {
          if (options.body) window.sent.push(JSON.parse(options.body));
          return fetched(url, options);
        };"""
    page.script(sent)
    page.set(temperature=0.25, top_p=0.5, top_k=5, min_p=0.125, max_tokens=3, seed=9007199254740991)
    page.set(repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=0.5, min_tokens=2)
    page.set(system="Be brief.", stop="END\n\\n\\n")
    page.ask("Hi")
    page.find("#knobs [type=reset]").click()
    page.find("#knobs [name=max_tokens]").clear()
    page.find("#clear").click()
    page.set(max_tokens=2)
    page.ask("Hi")
    common = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    question = {"role": "user", "content": "Hi"}
    assert page.script("return window.sent") == [
        {
            "messages": [{"role": "system", "content": "Be brief."}, question],
            "temperature": 0.25,
            "max_tokens": 3,
            "top_p": 0.5,
            "top_k": 5,
            "min_p": 0.125,
            "seed": 9007199254740991,
            "repetition_penalty": 1.5,
            "presence_penalty": -1,
            "frequency_penalty": 0.5,
            "min_tokens": 2,
            "stop": ["END", "\n\n"],
            **common,
        },
        {"messages": [question], "max_tokens": 2, **common},
    ]


def test_stop_ends_the_answer_and_its_request(window: Browser, make_server: MakeServer) -> None:
    served = make_server()
    window.open(served.url)
    window.set(temperature=1, max_tokens=200, min_tokens=200)
    with gate(served.llm, 9) as held:
        window.send("On and on")
        window.wait(lambda: window.script("return document.querySelector('.answer .text')?.textContent"))
        assert window.find("#log").get_attribute("aria-busy") == "true"
        window.find("#stop").click()
        window.wait(lambda: window.all(".answer:not(.streaming)"))
        held.open()
    assert served.wait_for(lambda stats: stats["num_aborted"] == 1)["num_finished"] == 0
    served.check_no_leak()
    answer = window.find(".answer")
    assert facts(answer)["Ended"] == "you stopped it"
    num = facts(answer)["Answer"].removesuffix(" tokens")
    assert 0 < int(num) <= 9
    assert window.replay(answer) == f"The same as far as it had come: {num} of {num} tokens."
    served.check_no_leak()
    assert window.complaints() == []


def test_what_the_server_refuses_is_said_in_its_words(page: Browser) -> None:
    page.set(max_tokens=4)
    page.ask("Fine")
    message = "far too long " * 40
    answer = page.ask(message.strip())
    error = answer.find_element("css selector", ".error")
    assert error.is_displayed()
    assert "256" in error.text
    assert not answer.find_element("css selector", "footer").is_displayed()
    assert page.find("#message").get_property("value") == message.strip(), "it can be mended"
    page.find("#message").clear()
    page.ask("Fine again")
    assert all("400" in complaint for complaint in page.complaints())


def test_the_end_of_a_long_chat_is_in_sight(page: Browser) -> None:
    page.set(max_tokens=2)
    below = """return arguments[0].getBoundingClientRect().bottom
        - document.getElementById('log').getBoundingClientRect().bottom"""
    for number in range(4):
        answer = page.ask(f"line\u2028line {number} " * 2)
        assert page.script(below, answer) <= 0
    page.script("document.getElementById('log').scrollTop = 0")
    page.replay(page.find(".answer"))
    assert page.script("return document.getElementById('log').scrollTop") == 0, (
        "whoever reads on is left there"
    )
    refused = page.ask("far too long " * 40)
    assert page.script(below, refused) <= 0
    page.complaints()


def test_wrong_settings_are_not_sent(page: Browser) -> None:
    page.set(top_p=2)
    page.send("Hello")
    assert page.all(".turn") == []
    assert page.script("return document.activeElement.name") == "top_p"
    page.set(top_p=0.5, max_tokens=2)
    page.ask("")
    assert len(page.all(".answer")) == 1


def test_a_server_that_has_gone(window: Browser, make_server: MakeServer) -> None:
    served = make_server()
    window.open(served.url)
    served.close()
    error = window.ask("Anybody?").find_element("css selector", ".error")
    assert error.text == "The server can't be reached. Is it still running?"
    window.wait(lambda: window.find("#health").get_attribute("class") == "bad")
    assert window.text("health") == error.text
    window.complaints()


def test_an_error_within_a_stream(window: Browser, make_server: MakeServer) -> None:
    served = make_server(request_timeout=4)  # its first tokens come far sooner
    window.open(served.url)
    window.set(min_tokens=200)
    with gate(served.llm, 5):
        answer = window.ask("Too slow")
    assert answer.find_element("css selector", ".error").text.startswith(
        "The request was not finished within"
    )
    served.check_no_leak()
    assert window.complaints() == []


def test_the_picture_of_a_busy_engine(window: Browser, make_server: MakeServer) -> None:
    served = make_server(max_num_seqs=2, num_blocks_override=64)
    window.open(served.url)
    assert [window.text(name) for name in ("running", "waiting", "others")] == ["0", "0", "None"]
    body = {"prompt": list(range(2, 52)), "max_tokens": 150, "n": 12, "min_tokens": 150}
    with ThreadPoolExecutor(1) as pool, slowed(served.llm, 0.2):
        answer = pool.submit(served.http().post, "/v1/completions", json=body)
        window.wait(lambda: window.text("running") == "2")
        assert window.text("waiting") == "10"
        window.wait(lambda: window.text("rate") not in ("–", "0"))
        rows = [row.text for row in window.all("#requests li")]
        others = window.text("others")
        counts, bars = window.script(BLOCKS)  # at one time, as the page goes on
    assert answer.result().status_code == 200
    assert len(rows) == 5
    assert "answer, " in rows[0]
    assert all("waiting, 0 of 150 tokens" in row for row in rows[2:])
    assert others == "and 7 more"
    assert sum(counts) == 64
    assert counts[0] > 0
    assert abs(sum(bars) - 1) < 0.01
    window.wait(lambda: window.text("finished") == "1")
    window.wait(lambda: [window.text(name) for name in ("running", "held")] == ["0", "0"])
    assert int(window.text("cached")) > 0
    assert window.text("hits") != "–"
    assert window.complaints() == []


def test_nobody_watches_a_hidden_page(page: Browser) -> None:
    """One question on its way may still be counted; no other follows."""
    hide = "Object.defineProperty(document, 'visibilityState', {value: arguments[0], configurable: true});"
    tell = "document.dispatchEvent(new Event('visibilitychange'));"
    count = "return performance.getEntriesByType('resource').filter(e => e.name.endsWith('/engine')).length"
    page.wait(lambda: page.script(count) >= 2)
    page.script(hide + tell, "hidden")
    page.driver.execute_async_script("setTimeout(arguments[0], 100)")
    before = page.script(count)
    page.driver.execute_async_script("setTimeout(arguments[0], 2500)")
    assert page.script(count) == before
    page.script(hide + tell, "visible")
    page.wait(lambda: page.script(count) > before)


def test_with_a_key_as_password(window: Browser, make_server: MakeServer) -> None:
    served = make_server(api_keys=("right",))
    window.driver.get(served.url.replace("://", "://user:wrong@"))
    assert window.all("#message") == []
    window.open(served.url.replace("://", "://user:right@"))
    window.set(max_tokens=4)
    answer = window.ask("Let me in")
    assert window.replay(answer).startswith("The same to the last token")
    assert all("401" in complaint for complaint in window.complaints())


def test_by_keyboard_alone(page: Browser, server: Running) -> None:
    """The message has the focus at first; Shift+Enter breaks its line; Tab goes to all there is."""
    assert page.script("return document.activeElement.id") == "message"
    page.find("#message").send_keys("two", Keys.SHIFT, Keys.ENTER, Keys.NULL, "lines")
    assert page.find("#message").get_property("value") == "two\nlines"
    page.set(max_tokens=3)
    page.ask("!")
    assert page.script("return document.activeElement.id") == "message"
    page.script("document.getElementById('log').focus()")
    reached = []
    for _ in range(24):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.script("const e = document.activeElement; return e.id || e.name || e.className"))
    assert {"replay", "message", "clear", "send", "temperature", "seed", "stop"} <= set(reached)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_everything_has_a_name(page: Browser, server: Running, width: int, height: int) -> None:
    page.open(server.url, width=width, height=height)
    page.script("document.querySelectorAll('details').forEach(panel => { panel.open = true; })")
    page.script("document.getElementById('knobs').elements.max_tokens.value = 2")
    page.ask("Hello")
    controls = page.all("button, input, textarea, summary, [role=img], [role=log]")
    unnamed = [control.get_attribute("outerHTML") for control in controls if control.is_displayed()]
    assert len(unnamed) > 15
    assert [
        c.get_attribute("outerHTML") for c in controls if c.is_displayed() and not c.accessible_name
    ] == []


# Text against the ground behind it, by the formula of the web's accessibility guidelines.
CONTRASTS = """
const light = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const opaque = (color) => !/, 0\\)$|transparent/.test(color);
const ground = (element) => {
  const color = getComputedStyle(element).backgroundColor;
  return opaque(color) || !element.parentElement ? color : ground(element.parentElement);
};
const poor = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || !element.checkVisibility()) continue;
  const [a, b] = [light(getComputedStyle(element).color), light(ground(element))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) poor.push(`${element.outerHTML.slice(0, 80)} ${contrast}`);
}
return poor;
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_fits_and_can_be_read(page: Browser, server: Running, width: int, height: int, dark: bool) -> None:
    page.open(server.url, width=width, height=height, dark=dark)
    page.script("document.querySelectorAll('details').forEach(panel => { panel.open = true; })")
    page.script("document.getElementById('knobs').elements.max_tokens.value = 20")
    page.replay(page.ask("a-word-that-is-far-too-long-for-any-line-" * 4))
    scheme = page.script("return getComputedStyle(document.body).backgroundColor")
    assert scheme == ("rgb(18, 22, 27)" if dark else "rgb(246, 247, 249)")
    assert page.script(CONTRASTS) == []
    assert page.script("return document.documentElement.scrollWidth") == width
    assert page.script("return document.documentElement.scrollHeight") == height
    wide = """return [...document.querySelectorAll('#log, .side, body *')]
        .filter((e) => e.scrollWidth > e.clientWidth + 1 && e.checkVisibility())
        .filter((e) => getComputedStyle(e).display !== 'inline' && !e.matches('.unseen, textarea, input'))
        .map((e) => e.outerHTML.slice(0, 100))"""
    assert page.script(wide) == []
