"""The workbook in a real browser: JupyterLab opened by Chromium, cells run, sliders moved, a hanging launch interrupted.

Debian: `apt-get install chromium`, then `pip install -e '.[browser]'`; without them the tests are skipped. Screenshots of
each notebook are left in the folder that MINITITAN_SCREENSHOTS names.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import nbformat
import psutil
import pytest

ROOT = pathlib.Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are in the page too
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def workbook(tmp_path_factory):
    """A folder with copies of the notebooks and what they read, for JupyterLab saves what it runs."""
    folder = tmp_path_factory.mktemp("workbook")
    for name in ("notebooks", "figures"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "published_results.json", folder / "tests")
    return folder


@pytest.fixture(scope="module")
def lab(workbook, tmp_path_factory):
    """The address of a running JupyterLab, with its token."""
    own = tmp_path_factory.mktemp("jupyter")
    for name, values in SETTINGS.items():
        path = own / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    places = {"JUPYTER_RUNTIME_DIR": own / "runtime", "JUPYTERLAB_SETTINGS_DIR": own / "settings"}
    places |= {"JUPYTER_CONFIG_DIR": own / "config", "JUPYTERLAB_WORKSPACES_DIR": own / "workspaces"}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.port=0"]
    environment = os.environ | {name: str(path) for name, path in places.items()}
    with open(own / "log", "w") as log:
        server = subprocess.Popen(command, cwd=workbook, env=environment, stdout=log, stderr=log)
    try:
        about = own / "runtime" / f"jpserver-{server.pid}.json"
        _until(lambda: about.exists() and about.read_text(), 60, lambda: (own / "log").read_text()[-2000:])
        told = json.loads(about.read_text())
        address = f"{told['url']}lab/tree/notebooks/{{}}?token={told['token']}&reset"
        _until(lambda: _answers(told["url"], told["token"]), 60, lambda: "JupyterLab does not answer")
        yield address
    finally:
        children = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        _, left = psutil.wait_procs(children, 10)
        for process in left:
            process.kill()


def _answers(url: str, token: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}api/status?token={token}", timeout=5).status == 200
    except OSError:
        return False


def _until(true, seconds: float, otherwise) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    with playwright.sync_playwright() as p:
        # As root Chromium has no sandbox, and in a container /dev/shm can be too small for it.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(60_000)
    yield page
    look(page, "last")
    page.close()


def open_notebook(page, address: str, name: str) -> None:
    """Opens it and waits for its kernel: a cell run before that brings up a question for the kernel."""
    page.goto(address.format(name))
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    page.wait_for_function("document.querySelector('#jp-main-statusbar')?.innerText.includes('| Idle')")


def run_all(page, address: str, name: str, seconds: float = 240) -> None:
    """Opens the notebook, runs all cells by the menu and waits until the last one has its number, or nothing runs."""
    cells = [c for c in nbformat.read(ROOT / "notebooks" / name, as_version=4).cells if c.cell_type == "code"]
    open_notebook(page, address, name)
    page.locator(".lm-MenuBar-item", has_text="Run").click()
    page.locator(".lm-Menu-item", has_text="Run All Cells").first.click()
    prompts = "[...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')].map(p => p.textContent)"
    page.wait_for_function(f"{prompts}.includes('[*]:')")
    status, idle, end = page.locator("#jp-main-statusbar"), 0, time.monotonic() + seconds
    while (told := page.evaluate(prompts))[
        -1
    ] != f"[{len(cells)}]:" and idle < 20:  # one that may raise clears the stars
        assert time.monotonic() < end, f"after {seconds} s {name} is at {told}"
        idle = idle + 1 if "| Idle" in status.inner_text() else 0
        time.sleep(0.25)
    red = page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()
    assert len(red) == sum("raises-exception" in c.metadata.get("tags", []) for c in cells), red
    numbers = [int(prompt.strip("[]: ")) for prompt in told]  # a folded solution shows none
    assert numbers == sorted(set(numbers)) and numbers[-1] == len(cells)
    look(page, name)


def look(page, name: str) -> None:
    if folder := os.environ.get("MINITITAN_SCREENSHOTS"):
        page.screenshot(path=os.path.join(folder, name.removesuffix(".ipynb") + ".png"))


def test_the_first_notebook_runs_from_the_top(page, lab):
    run_all(page, lab, "00_ranks_and_collectives.ipynb")


ANSWER = """picture => new Promise((answered, late) => {
    const pressed = new Promise(at => addEventListener("keydown", () => at(performance.now()), {capture: true, once: true}))
    new MutationObserver(async () => answered(performance.now() - await pressed))
        .observe(picture, {childList: true, subtree: true})
    setTimeout(() => late(Error("the picture is what it was, 10 s after the key")), 10_000)
})"""  # milliseconds from the key to the new picture


@pytest.mark.parametrize("name", ["04_fsdp.ipynb", "09_pipeline.ipynb", "20_plan_a_cluster.ipynb"])
def test_a_slider_changes_its_picture(page, lab, name):
    run_all(page, lab, name)
    handle = page.locator(".widget-slider .noUi-handle").first
    handle.scroll_into_view_if_needed()
    picture = page.locator(".widget-html-content").last
    before = picture.inner_html()
    handle.focus()
    page.evaluate(f"picture => {{ window.answer = ({ANSWER})(picture) }}", picture.element_handle())
    page.keyboard.press("ArrowRight")
    ms = page.evaluate("window.answer")
    assert picture.inner_html() != before
    print(f"{name}: {ms:.0f} ms from the key to the picture")  # 150 are asked for; `pytest -s` tells
    look(page, name.replace(".ipynb", "_slider.ipynb"))


def test_a_hanging_launch_is_interrupted_and_the_next_cell_runs(page, lab, workbook):
    """By the stop button; no rank is left."""
    cells = [
        "import os, time\nfrom minititan.lab.launch import launch",
        "def hang():\n    print('wait' + 'ing', flush=True)\n    time.sleep(600)\n\n\nlaunch(hang, ranks=4, timeout=900)",
        "launch(os.getpid, ranks=2) and print('two ranks', 'answered')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, workbook / "notebooks" / "hang.ipynb")
    open_notebook(page, lab, "hang.ipynb")
    page.locator(".jp-CodeCell").first.click()
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Shift+Enter")
    page.locator(".jp-OutputArea-output", has_text="waiting").wait_for()
    page.locator("[data-command='notebook:interrupt-kernel']").first.click()
    page.locator(".jp-OutputArea-output", has_text="KeyboardInterrupt").wait_for()
    page.keyboard.press("Shift+Enter")
    page.locator(".jp-OutputArea-output", has_text="two ranks answered").wait_for()
    look(page, "hang")
