"""Metrics in a real Prometheus, and the dashboard in a real Chromium, over a real server."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ray.server_process import ServerProcess

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

MONITORING = Path(__file__).parents[2] / "configs" / "monitoring"
PROMETHEUS_PORT = 19090


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def load(server: ServerProcess, num_requests: int, max_tokens: int = 12) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda n: server.complete(f"Number {n} is", max_tokens=max_tokens, temperature=0), range(num_requests)
            )
        )


@pytest.fixture
def prometheus(disaggregated: ServerProcess, tmp_path: Path) -> Iterator[str]:
    """A Prometheus that scrapes the server with the shipped configuration, its target and interval apart."""
    text = (MONITORING / "prometheus.yml").read_text()
    text = text.replace("127.0.0.1:8000", disaggregated.url.removeprefix("http://")).replace("5s", "250ms")
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    process = subprocess.Popen(
        [
            program("prometheus"), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}", "--log.level=error",
        ],
        cwd=tmp_path,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{PROMETHEUS_PORT}"
    finally:
        process.terminate()
        process.wait(20)


def query(prometheus: str, expression: str) -> float:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}).json()
    result = answer["data"]["result"]
    return float(result[0]["value"][1]) if result else float("nan")


def test_a_real_prometheus_reads_what_the_server_counted(disaggregated: ServerProcess, prometheus: str) -> None:
    load(disaggregated, 6)
    disaggregated.wait_for_baseline()
    expected = disaggregated.state()["counters"]["bytes_received"]
    assert expected > 0
    deadline_s = time.monotonic() + 30
    while query(prometheus, "sum(pdserve:transfer_bytes_total)") != expected:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    assert query(prometheus, "pdserve:up") == 1
    assert query(prometheus, "sum(vllm:request_success_total)") >= 6
    assert query(prometheus, "sum(pdserve:divergences_total)") == 0
    assert query(prometheus, "histogram_quantile(0.5, sum by (le) (vllm:time_to_first_token_seconds_bucket))") > 0


def test_promtool_accepts_the_metrics_the_configuration_and_the_alerts(disaggregated: ServerProcess) -> None:
    text = httpx.get(f"{disaggregated.url}/metrics").text
    tool = program("promtool")
    checked = subprocess.run([tool, "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    complaints = [
        line
        for line in (checked.stdout + checked.stderr).splitlines()
        # Dashboards know these names, colons included.
        if "should not contain ':'" not in line and "metric names should not" not in line
    ]
    assert complaints == []
    subprocess.run([tool, "check", "config", str(MONITORING / "prometheus.yml")], check=True, capture_output=True)


def test_every_metric_of_the_grafana_dashboard_exists(disaggregated: ServerProcess) -> None:
    load(disaggregated, 1)
    text = httpx.get(f"{disaggregated.url}/metrics").text
    dashboard = json.loads((MONITORING / "grafana_dashboard.json").read_text())
    used = set(re.findall(r"(?:vllm|pdserve):\w+", json.dumps(dashboard)))
    assert len(used) > 15
    missing = {name for name in used if not re.search(rf"^{name}[ {{]", text, re.MULTILINE)}
    assert missing == set()


@pytest.fixture
def page(disaggregated: ServerProcess) -> Iterator[Any]:
    """The dashboard, open in Chromium; errors of the page fail the test."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program("chromium"), args=["--no-sandbox"])
        errors: list[str] = []
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(f"{disaggregated.url}/dashboard")
        page.wait_for_selector("[data-worker]")
        yield page
        browser.close()
        assert errors == []


def test_requests_appear_and_finish_on_the_dashboard(disaggregated: ServerProcess, page: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, disaggregated, 32, 16)
        page.wait_for_selector("[data-request][data-state=running]", timeout=60_000)
        loading.result()
    page.wait_for_selector("[data-request][data-state=running]", state="detached", timeout=30_000)
    assert page.locator("[data-request][data-state=finished]").count() >= 32
    assert page.locator("#divergences").inner_text() == "0"


def test_page_numbers_on_the_dashboard_equal_the_cluster_state(disaggregated: ServerProcess, page: Any) -> None:
    load(disaggregated, 4)
    state = disaggregated.wait_for_baseline()
    expected = {worker["name"]: worker["pages"] for worker in state["workers"]}
    shown: dict[str, Any] = {}
    deadline_s = time.monotonic() + 20
    while shown != expected:
        assert time.monotonic() < deadline_s, (shown, expected)
        time.sleep(0.3)
        shown = {
            article.get_attribute("data-worker"): {
                tier.get_attribute("data-tier"): json.loads(tier.get_attribute("data-pages"))
                for tier in article.locator("[data-tier]").all()
            }
            for article in page.locator("[data-worker]").all()
        }


def test_a_request_can_be_followed_by_keyboard(disaggregated: ServerProcess, page: Any) -> None:
    answer = disaggregated.complete("Follow me", max_tokens=6, temperature=0)
    selector = f"[data-follow='{answer['id']}']"
    page.wait_for_selector(selector)
    page.focus(selector)
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#follow h3:text-is('{answer['id']}')")
    text = page.locator("#follow").inner_text()
    assert "context-0 → generation-0" in text
    assert "6 tokens" in text
    page.wait_for_timeout(2500)  # two events later the focus is still there
    assert page.evaluate("document.activeElement.dataset.follow") == answer["id"]


@pytest.mark.parametrize("width", [390, 1440])
def test_the_dashboard_needs_no_sideways_scrolling(page: Any, width: int, tmp_path: Path) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_timeout(300)
    page.screenshot(path=str(tmp_path / f"dashboard-{width}.png"), full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
