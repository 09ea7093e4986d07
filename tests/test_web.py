"""The page of sample.py --web, in a real browser, and what its server refuses."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from checkpoints import save_run_with_text
from conftest import ROOT, TINY_RUN
from run_files import append_records

import web
from formats.huggingface import save_pretrained
from formats.load import load_model
from generation import text_loss
from model import GPT, GPTConfig
from sample import describe_loss, generate, sample_rows
from tokenizer import gpt2_encoding

HOSTILE = (
    "<script>alert('x')</script><img src=x onerror=alert(1)> 🙂 " + "naïve words & more " * 525
)


@pytest.fixture(scope="module")
def run_dir(commands, tiny_data, tmp_path_factory):
    """A run with the checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("runs")
    place = (f"--out-dir={folder}", "--run-name=tiny", f"--data-dir={tiny_data}")
    assert commands.run(ROOT / "train_gpt2.py", *TINY_RUN, *place).code == 0
    return folder / "tiny"


@pytest.fixture
def server(run_dir):
    with serving(run_dir) as started:
        yield started


def serving(*sources):
    models = web.Models(sources, torch.device("cpu"), torch.float32)
    server = web.new_server(models, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def address(server):
    return f"http://localhost:{server.server_port}/"


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium. `.ci/run` names it: there it is never skipped."""
    path = os.environ.get("TEST_BROWSER") or shutil.which("chromium")
    if path is None or "/snap/" in os.path.realpath(path):
        pytest.skip("needs a chromium")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = playwright.chromium.launch(executable_path=path, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """An empty tab of a phone; a script that fails or a dialog is an error of the test."""
    tab = browser.new_page(viewport={"width": 360, "height": 800})
    tab.set_default_timeout(60_000)
    problems = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("dialog", lambda dialog: problems.append(dialog.message))
    yield tab
    tab.close()
    assert problems == []


def set_number(page, name, value):
    page.eval_on_selector(
        f"#{name}", "(e, value) => { e.value = value; e.dispatchEvent(new Event('input')); }", value
    )


def wait_for(page, text, panel=0):
    """Wait until the status of a panel has a text; return the panel's text."""
    section = page.locator("section").nth(panel)
    section.get_by_role("status").filter(has_text=text).wait_for()
    return section.locator(".text").text_content()


INSIDE = """selector => {
  const part = document.querySelector(selector).getBoundingClientRect();
  const box = document.querySelector(".text").getBoundingClientRect();
  const inside = part.top >= 0 && part.bottom <= innerHeight;
  return inside && (selector[0] === "#" || part.bottom <= box.bottom);
}"""


def visible(text):
    return text.replace("\n", "⏎").replace(" ", "·")


@pytest.mark.slow
def test_page_continues_as_generate_and_branches(run_dir, server, page):
    page.goto(address(server))
    page.fill("#prompt", "Once 🙂")
    for name, value in {"max_new_tokens": 12, "temperature": 0.8, "top_k": 40, "seed": 7}.items():
        set_number(page, name, str(value))
    page.get_by_role("button", name="Continue").click()
    model, options = load_model(run_dir), {"temperature": 0.8, "top_k": 40, "seed": 7}
    assert wait_for(page, "done") == generate(model, "Once 🙂", 12, **options)[0]
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    tokens, likeliest = page.locator(".token"), page.locator("#likeliest button")
    tokens.nth(1).hover()
    assert likeliest.count() == 10
    texts = page.locator("#likeliest button span:last-child").all_text_contents()
    shares = [float(text.removesuffix(" %")) for text in texts]
    assert shares == sorted(shares, reverse=True)
    kept = visible("Once 🙂" + tokens.first.text_content())
    chosen = likeliest.nth(3).locator("span").first.text_content()
    likeliest.nth(3).click()
    assert visible(wait_for(page, "done")).startswith(kept + chosen)
    # By keyboard: to the second token, to its likeliest ones, and back.
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert likeliest.first.evaluate("e => e === document.activeElement")
    page.keyboard.press("Escape")
    assert tokens.nth(1).evaluate("e => e === document.activeElement")


@pytest.mark.slow
def test_page_shows_the_end_of_a_long_text_and_the_list_within_the_window(server, page):
    page.set_viewport_size({"width": 400, "height": 700})
    page.goto(address(server))
    page.fill("#prompt", "word " * 3000)
    set_number(page, "max_new_tokens", "40")
    page.get_by_role("button", name="Continue").click()
    wait_for(page, "done: 40 tokens")
    assert page.evaluate(INSIDE, ".token:last-child")
    tops = "es => new Set(es.map(e => e.getBoundingClientRect().top)).size"
    assert page.locator(".buttons button").evaluate_all(tops) == 1
    page.locator(".token").last.focus()
    page.keyboard.press("Enter")
    assert page.evaluate(INSIDE, "#likeliest")
    focused, likeliest = "e => e === document.activeElement", page.locator("#likeliest button")
    for key, place in (("ArrowDown", 1), ("ArrowUp", 0), ("ArrowUp", 9), ("ArrowDown", 0)):
        page.keyboard.press(key)
        assert likeliest.nth(place).evaluate(focused)
    page.keyboard.press("Enter")
    wait_for(page, "done: 40 tokens")
    assert page.locator(".token").first.evaluate(focused)
    page.fill("#seed", "99999999999999999999")
    page.get_by_role("button", name="Another seed").click()
    assert page.locator("#seed").evaluate(focused)  # the browser names the limit there
    page.fill("#seed", "9007199254740990")
    page.get_by_role("button", name="Another seed").click()
    wait_for(page, "done: 40 tokens")
    assert page.input_value("#seed") == "9007199254740991"


@pytest.mark.slow
def test_page_tells_that_another_one_computes(server, page):
    page.goto(address(server))
    page.fill("#prompt", "One two three")
    page.get_by_role("button", name="Score").click()
    wait_for(page, "nats per token")
    with server.lock:
        page.locator(".token").last.hover()
        page.locator("#likeliest").get_by_text("Waiting until another page").wait_for()
        page.get_by_role("button", name="Continue").click()
        wait_for(page, "Waiting until another page has its answer")
    wait_for(page, "done")


@pytest.mark.slow
def test_page_scores_a_hostile_text_as_the_command_does(run_dir, server, page, tmp_path):
    (tmp_path / "text.txt").write_text(HOSTILE, encoding="utf-8")
    score = describe_loss(load_model(run_dir), tmp_path / "text.txt", torch.float32)
    page.goto(address(server))
    page.fill("#prompt", HOSTILE)
    page.get_by_role("button", name="Score").click()
    assert wait_for(page, score.partition(": ")[2]) == HOSTILE
    assert page.locator("section script, section img").count() == 0
    words = page.locator("section p").last.text_content()
    assert words.startswith("Most surprising: ")
    assert words.count("(") >= 8
    page.locator(".token").nth(40).hover()
    page.locator("#likeliest button").nth(9).wait_for()
    page.fill("#prompt", "")
    page.get_by_role("button", name="Score").click()
    wait_for(page, "a loss needs a text of 2 tokens or more")


@pytest.mark.slow
def test_page_stops_and_moves_through_checkpoints(run_dir, tmp_path, page):
    run = shutil.copytree(run_dir, tmp_path / "copy")
    with serving(run, run_dir / "checkpoints/step_00000004") as server:
        page.goto(address(server))
        set_number(page, "max_new_tokens", "500")
        page.get_by_role("button", name="Continue").click()
        page.locator(".token").nth(3).wait_for()
        page.get_by_role("button", name="Stop").click()
        assert len(wait_for(page, "stopped")) > 10
        set_number(page, "max_new_tokens", "9")
        page.get_by_role("button", name="Continue").click()
        prompt, models = "Once upon a time", [f"step_0000000{step}" for step in (8, 4)]
        texts = [
            generate(load_model(run / "checkpoints" / name), prompt, 9, seed=1337, top_k=50)[0]
            for name in models
        ]
        assert wait_for(page, "done") == texts[0]
        assert wait_for(page, "done", panel=1) == texts[1]
        slider = page.get_by_role("slider", name="Checkpoint of")
        slider.first.press("ArrowLeft")
        page.get_by_text("checkpoint of step 4").wait_for()
        page.wait_for_function(
            "text => document.querySelector('.text').textContent === text", arg=texts[1]
        )
        slider.first.press("ArrowRight")
        page.wait_for_function(
            "text => document.querySelector('.text').textContent === text", arg=texts[0]
        )
        # A new checkpoint of a run that trains; the last one was chosen, so the page follows.
        new = shutil.copytree(run / "checkpoints/step_00000004", tmp_path / "step_00000012")
        new.rename(run / "checkpoints" / new.name)
        page.get_by_text("checkpoint of step 12").wait_for()
        page.wait_for_function(
            "text => document.querySelector('.text').textContent === text", arg=texts[1]
        )


@pytest.mark.slow
def test_page_marks_copied_tokens_and_shows_their_place(tmp_path, page, monkeypatch):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=8)).eval()
    row = sample_rows(model, "Once", 1, 1337, max_new_tokens=60, top_k=50)[0]
    words = gpt2_encoding().encode_ordinary(" one two three <b>four</b> five six seven")
    save_run_with_text(tmp_path / "run", tmp_path / "data", [*words, *row[10:50], *words], model)
    with serving(tmp_path / "run") as server:
        page.goto(address(server))
        page.fill("#prompt", "Once")
        set_number(page, "max_new_tokens", "60")
        page.get_by_role("button", name="Continue").click()
        share = f"{100 * 40 / (len(row) - 1):.1f} %"
        wait_for(page, f"done: {len(row) - 1} tokens, {share} of them copied")
        marked = "".join(page.locator(".token.copied").all_text_contents())
        assert gpt2_encoding().decode(row[12:48]) in marked
        page.locator(".token.copied").nth(20).hover()
        quote = page.locator("#likeliest .quote")
        quote.wait_for()
        shown = quote.text_content()
        assert shown.startswith(
            "In the training text: …  one two three <b>four</b> five six seven".replace(
                "  one", " one"
            )
        )
        assert page.locator("#likeliest mark").text_content() == gpt2_encoding().decode(row[10:50])
        assert page.locator("#likeliest b").count() == 0
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(path=f"{folder}/copies.png")
        page.keyboard.press("Escape")
        page.locator(".token").nth(2).hover()
        quote.wait_for(state="detached")
        monkeypatch.setattr(web, "MAX_SEARCHED_TOKENS", 10)
        page.get_by_role("button", name="Continue").click()
        wait_for(page, "copies are unknown: the training text is long: add --copies to sample.py")
        assert page.locator(".token.copied").count() == 0


def post(server, path, body=b"{}", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("POST", path, body, {name.title(): value for name, value in headers.items()})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_server_refuses_other_sites_paths_and_large_bodies(server):
    tunnel = {"host": "localhost:9000", "origin": "http://localhost:9000"}  # with ssh -L
    assert post(server, "/list_models", **tunnel)[0] == 200
    assert post(server, "/list_models", host="evil.example")[0] == 403
    assert post(server, "/list_models", host="localhost.evil.example:80")[0] == 403
    assert post(server, "/list_models", origin="http://evil.example")[0] == 403
    assert post(server, "/list_models", origin="null")[0] == 403
    assert post(server, "/../model.py", b" " * 1_000_000)[0] == 404
    for size in (1_000_001, 5_000_000):  # the answer comes after the body
        assert post(server, "/score_text", b" " * size)[0] == 413
        assert post(server, "/score_text", b" " * size, host="evil.example")[0] == 403
    assert server.server_address[0] == "127.0.0.1"


def test_an_error_is_the_last_line_of_an_answer(server, capfd):
    request = {"model": 0, "text": "a b", "seed": 1, "max_new_tokens": 1, "top_k": 1, "top_p": 1}
    for wrong, message in (
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1, "step": 5}, "the checkpoint of step 5 was deleted"),
        ({"temperature": 1, "top_p": 2}, "--top-p must be at most 1, not 2"),
        ({"temperature": 1, "seed": 2**63}, f"at least 0 and below 2**63, not {2**63}"),
        ({"temperature": 1, "seed": -1}, "at least 0 and below 2**63, not -1"),
    ):
        status, lines = post(server, "/continue_text", json.dumps(request | wrong).encode())
        assert status == 200
        assert message in json.loads(lines.splitlines()[-1])["error"]
    assert "Traceback" not in capfd.readouterr().err


def mean_loss(server, model=0):
    body = json.dumps({"model": model, "step": None, "text": "Once upon a time"}).encode()
    return json.loads(post(server, "/score_text", body)[1].splitlines()[-1])["mean"]


def test_a_run_or_export_that_is_written_again_is_loaded_again(run_dir, tmp_path):
    run, old = shutil.copytree(run_dir, tmp_path / "run"), run_dir / "checkpoints/step_00000004"
    losses = [text_loss(load_model(path), "Once upon a time") for path in (run_dir, old)]
    assert losses[0] != losses[1]
    save_pretrained(load_model(run_dir), tmp_path)
    with serving(run, tmp_path / "model.safetensors", f"{run}@best") as server:
        append_records(run, {"step": 8, "val_loss": 1.0})  # the best step from now on
        assert [mean_loss(server, model) for model in range(3)] == [pytest.approx(losses[0])] * 3
        shutil.rmtree(run / "checkpoints/step_00000008")
        shutil.copytree(old, run / "checkpoints/step_00000008")
        save_pretrained(load_model(old), tmp_path)
        assert [mean_loss(server, model) for model in range(3)] == [pytest.approx(losses[1])] * 3


def test_who_waits_for_another_page_is_told_and_lists_do_not_wait(server):
    def first_line(path, body):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("POST", path, body)
        answer = connection.getresponse()
        return json.loads(answer.readline()), answer

    with server.lock:  # as while another request computes
        assert "models" in first_line("/list_models", "{}")[0]
        body = '{"model": 0, "step": null, "text": "Once upon a time"}'
        told, answer = first_line("/score_text", body)
        assert told == {"waiting": True}
    assert "mean" in json.loads(answer.read().splitlines()[-1])


BROWSER = """#!{python}
import sys, urllib.request
from pathlib import Path
Path(__file__).with_name("page").write_bytes(urllib.request.urlopen(sys.argv[1]).read())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a script as a browser")
def test_a_browser_in_the_foreground_gets_the_page(run_dir, tmp_path):
    script, got = tmp_path / "browser", tmp_path / "page"
    script.write_text(BROWSER.format(python=sys.executable))
    script.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {n: value for n, value in os.environ.items() if n != "SSH_CONNECTION"}
    command = [sys.executable, ROOT / "sample.py", f"--model={run_dir}", "--web", f"--port={port}"]
    with subprocess.Popen(command, env=variables | {"BROWSER": str(script)}) as program:
        while not (got.exists() and b"</html>" in got.read_bytes()):
            assert program.poll() is None
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)


def test_a_port_that_is_taken_is_one_line_with_the_next_free_one(commands, run_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = commands.run(ROOT / "sample.py", f"--model={run_dir}", "--web", f"--port={port}")
    assert done.code == 2
    assert f"error: --port {port} is taken or not allowed: use --port " in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_a_text_is_generated_ends_the_program_quietly(run_dir):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, ROOT / "sample.py", f"--model={run_dir}", "--web", "--no-browser"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, f"--port={port}", "--device=cpu"], **pipes) as program:
        assert program.stdout.readline() == f"http://127.0.0.1:{port}  (Ctrl-C ends it)\n"
        request = {"model": 0, "text": "a", "temperature": 1, "top_k": 0, "top_p": 1, "seed": 1}
        body = json.dumps(request | {"max_new_tokens": 100_000})
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/continue_text", body)
        answer = connection.getresponse()
        for _ in range(5):
            answer.readline()
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate()
    assert (program.returncode, errors) == (0, "")
