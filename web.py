"""The page of `python sample.py --web`: continue texts, look inside, score, watch a run learn.

Python's own HTTP server, on the loopback interface only, serves `assets/page.html` and answers its
requests. A request is a POST of JSON, and its answer is a stream of JSON lines. Each has
`{"error": text}` as its last line if something is wrong. One request computes at a time; until it
is their turn, the others get `{"waiting": true}` each second.

    /list_models    the models, each with the steps of its run's checkpoints
    /continue_text  the pieces of a continuation, one by one, then what it copies
    /look_inside    the most likely tokens after some tokens
    /score_text     the pieces of a text with their losses, then the mean

A *piece* is the smallest number of tokens whose bytes are whole characters: its text, ids,
probability and, for the place of its first token, the likeliest tokens.
"""

import codecs
import json
import os
import socket
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread, current_thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from corpus.overlap import find_copies, open_training_text, quote
from formats.checkpoint import Checkpoint, complete_checkpoints, read_state
from formats.huggingface import HF_WEIGHTS_NAME
from formats.load import find_checkpoint, is_hugging_face, load_model
from formats.metrics import find_run, is_run
from generation import generate_tokens, text_loss
from model import GPT
from runtime.errors import UserError, is_user_error
from tokenizer import bits_per_byte, gpt2_encoding, prompt_ids

PAGE = Path(__file__).parent / "assets/page.html"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_SEARCHED_TOKENS = 10_000_000  # for copies after each continuation, in a few seconds
MAX_BODY = 1_000_000  # bytes of a request
N_LIKELIEST = 10
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
Send = Callable[[dict[str, Any]], None]  # writes a line of the answer
Request = dict[str, Any]


class Models(NamedTuple):
    """The models that the page shows."""

    sources: Sequence[str | Path]
    device: torch.device
    dtype: torch.dtype
    searches_all: bool = False
    """Look for copies also in training texts above `MAX_SEARCHED_TOKENS`."""

    def checkpoints(self, number: int) -> dict[int, Path]:
        """Return the checkpoints of a model's run by their step; none if it is not a run."""
        run = find_run(str(self.sources[number]))
        paths = complete_checkpoints(run / "checkpoints") if is_run(run) else []
        return {int(path.name.rpartition("_")[2]): path for path in reversed(paths)}

    def find(self, request: Request) -> str | Path:
        """Return the model that a request names by number and, for a run, by step (or None)."""
        number, step = int(request["model"]), request.get("step")
        saved = self.checkpoints(number)
        newest = next(reversed(saved.values()), self.sources[number])
        path = newest if step is None else saved.get(step)
        if path is None:
            raise UserError(f"the checkpoint of step {step} was deleted: choose another one")
        return path

    def get(self, request: Request) -> GPT:
        """Load the model that a request names."""
        path = self.find(request)
        return kept_model(path, self.device, version(path))


@lru_cache(maxsize=3)  # the last ones that were used stay in memory
def kept_model(source: str | Path, device: torch.device, _version: object) -> GPT:
    """Load a model, unless this version of it is in memory."""
    return load_model(source, device)


def version(source: str | Path) -> object:
    """Return values that change when a model's weights are written again; on the hub, never."""
    path = find_run(source) if is_hugging_face(source) else find_checkpoint(source)
    weights = (path.parent if path.is_file() else path) / HF_WEIGHTS_NAME
    found = weights.stat() if weights.exists() else None
    return path, found and (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Pieces:
    """Group tokens into pieces, and send each."""

    def __init__(self, send: Send) -> None:
        self.send, self.decoder = send, codecs.getincrementaldecoder("utf-8")("replace")
        self.text, self.ids, self.loss, self.top = "", list[int](), 0.0, list[Any]()

    def add(self, token: int, loss: float, top: Sequence[Any] = ()) -> None:
        """Add a token with its loss in nats, and the likeliest tokens at its place."""
        self.top = self.top if self.ids else [*top]
        self.text += self.decoder.decode(gpt2_encoding().decode_single_token_bytes(token))
        self.ids.append(token)
        self.loss += loss
        if not self.decoder.getstate()[0]:  # no incomplete character
            self.close()

    def close(self) -> None:
        """Send the tokens so far, even if they end within a character."""
        if self.ids:
            text = self.text + self.decoder.decode(b"", final=True)
            self.send({"text": text, "ids": self.ids, "loss": self.loss, "top": self.top})
        self.text, self.ids, self.loss, self.top = "", [], 0.0, []


def likeliest(logits: Tensor) -> list[tuple[str, float, int]]:
    """Return text, probability and id of the likeliest tokens; `logits` are (V,) float32."""
    values, ids = (each.tolist() for each in torch.softmax(logits, dim=-1).topk(N_LIKELIEST))
    tokens = map(gpt2_encoding().decode_single_token_bytes, ids)
    texts = [token.decode(errors="backslashreplace") for token in tokens]
    return [*zip(texts, values, ids, strict=True)]


# --- answers ----------------------------------------------------------------------------------


def list_models(models: Models, _: Request, send: Send) -> None:
    """Send the name of each model and the steps of its checkpoints."""
    steps = [[*models.checkpoints(number)] for number in range(len(models.sources))]
    names = map(str, models.sources)
    send({"models": [{"name": n, "steps": s} for n, s in zip(names, steps, strict=True)]})


def continue_text(models: Models, request: Request, send: Send) -> None:
    """Send the ids of the text, then each piece of its continuation."""
    if not 0 <= (seed := int(request["seed"])) < 2**63:
        raise UserError(f"the seed must be at least 0 and below 2**63, not {seed}")
    model, pieces = models.get(request), Pieces(send)
    ids = request.get("ids") or prompt_ids(request["text"])
    send({"prompt": ids})
    row = [*ids]

    def send_token(tokens: Tensor, logits: Tensor) -> None:  # (1,), (1, V)
        row.append(int(tokens[0]))
        loss = float(torch.log_softmax(logits[0], dim=-1)[tokens[0]].neg())
        pieces.add(int(tokens[0]), loss, likeliest(logits[0]))

    options: dict[str, Any] = {n: float(request[n]) for n in ("temperature", "top_p")}
    generate_tokens(
        model,
        torch.tensor([ids], device=models.device),
        int(request["max_new_tokens"]),
        top_k=int(request["top_k"]),
        generator=torch.Generator(models.device).manual_seed(seed),
        dtype=models.dtype,
        on_token=send_token,
        **options,
    )
    pieces.close()
    if not is_hugging_face(path := models.find(request)):
        send(search_copies(path, row, len(ids), models.searches_all))


def search_copies(
    path: str | Path, row: Sequence[int], n_prompt: int, searches_all: bool
) -> dict[str, Any]:
    """Return the passages that a run's sample copies from its training text, or why it is unknown.

    A passage has its place in the row, and its text there with the words before and after it.
    """
    try:
        found = find_checkpoint(path)
        text = open_training_text(Checkpoint(found, read_state(found)))
    except (OSError, UserError) as error:
        return {"unsearched": str(error)}
    if text.total_tokens > MAX_SEARCHED_TOKENS and not searches_all:
        return {"unsearched": "the training text is long: add --copies to sample.py"}
    fraction, passages = find_copies([row], n_prompt, text)
    spans = [
        {"start": p.start, "stop": p.start + p.n_tokens, "quote": quote(text, p)} for p in passages
    ]
    return {"copied": fraction, "passages": spans}


def look_inside(models: Models, request: Request, send: Send) -> None:
    """Send the likeliest tokens after the request's tokens."""
    tokens = torch.tensor([request["ids"]], device=models.device)
    options: dict[str, Any] = {"temperature": 0, "dtype": models.dtype, "stop_token": None}

    def send_top(_: Tensor, logits: Tensor) -> None:
        send({"top": likeliest(logits[0])})

    generate_tokens(models.get(request), tokens, 1, on_token=send_top, **options)


def score_text(models: Models, request: Request, send: Send) -> None:
    """Send each piece of a text with its loss, then the mean loss and bits per byte."""
    model, text, pieces = models.get(request), str(request["text"]), Pieces(send)
    ids = gpt2_encoding().encode_ordinary(text)
    rest = iter(ids[1:])

    def send_losses(losses: Sequence[float]) -> None:
        for loss, token in zip(losses, rest, strict=False):
            pieces.add(token, loss)

    if ids:
        pieces.add(ids[0], 0.0)  # nothing predicts it
    loss = text_loss(model, text, models.dtype, send_losses)
    pieces.close()
    send({"mean": loss, "bits": bits_per_byte(loss, ids), "tokens": len(ids)})


ANSWERS: dict[str, Callable[[Models, Request, Send], None]] = {
    f"/{answer.__name__}": answer
    for answer in (list_models, continue_text, look_inside, score_text)
}


# --- server -----------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """An HTTP server on the loopback interface that knows the models."""

    def __init__(self, port: int, models: Models) -> None:
        self.models, self.lock = models, Lock()  # one computation at a time
        self.computing = current_thread()  # or the last one that computed
        self.is_closing = False
        super().__init__((LOOPBACK[1], port), Handler)


class Handler(BaseHTTPRequestHandler):
    """Answer the requests of the page, and of no other site."""

    server: Server

    def do_GET(self) -> None:
        """Send the page."""
        if self.is_refused():
            return
        if urlsplit(self.path).path != "/":
            self.send_error(404)
            return
        self.start("text/html; charset=utf-8")
        self.wfile.write(PAGE.read_bytes())

    def do_POST(self) -> None:
        """Stream the answer of a request, until it is complete or the page is closed."""
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(max(0, min(length, MAX_BODY)))
        for start in range(MAX_BODY, length, MAX_BODY):  # a client that still sends gets no answer
            self.rfile.read(min(MAX_BODY, length - start))
        if self.is_refused():
            return
        if self.path not in ANSWERS or not 0 <= length <= MAX_BODY:
            self.send_error(413 if length > MAX_BODY else 404)
        else:
            self.start("application/x-ndjson")
            with suppress(ConnectionError):  # the page was closed
                self.answer(body)

    def answer(self, body: bytes) -> None:
        """Compute and send an answer; an error is its last line."""
        try:
            with ExitStack() as stack:
                if self.path != "/list_models":  # which computes nothing
                    while not self.server.lock.acquire(timeout=1):
                        self.send_line({"waiting": True})  # raises if the page was closed
                    stack.callback(self.server.lock.release)
                    self.server.computing = current_thread()
                ANSWERS[self.path](self.server.models, json.loads(body), self.send_line)
        except ConnectionError:
            raise
        except Exception as error:
            self.send_line({"error": str(error).partition("\n")[0] or type(error).__name__})
            if not is_user_error(error):
                raise

    def is_refused(self) -> bool:
        """Refuse a request that another site or name sent, as with DNS rebinding."""
        host = self.headers.get("Host", "")
        is_own = urlsplit(f"//{host}").hostname in LOOPBACK
        if not is_own or self.headers.get("Origin", f"http://{host}") != f"http://{host}":
            self.send_error(403, "only pages of this machine")
            return True
        return False

    def start(self, content_type: str) -> None:
        """Send the status and the headers."""
        self.send_response(200)
        for name, value in {"Content-Type": content_type, **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_line(self, value: Mapping[str, Any]) -> None:
        """Send a line of JSON."""
        if self.server.is_closing:
            raise ConnectionAbortedError
        self.wfile.write(f"{json.dumps(value)}\n".encode())

    def log_message(self, *_: Any) -> None:  # noqa: ANN401
        """Print nothing for a request."""


def serve(models: Models, port: int, open_browser: bool) -> None:
    """Serve the page until Ctrl-C; raise UserError if the port is taken."""
    for number in range(len(models.sources)):  # a wrong name is an error before the page opens
        models.get({"model": number})
    with new_server(models, port) as server:
        url = f"http://{LOOPBACK[1]}:{port}"  # localhost may be another program's ::1
        print(f"{url}  (Ctrl-C ends it)", flush=True)
        if "SSH_CONNECTION" in os.environ:
            tunnel = f"ssh -L {port}:{LOOPBACK[1]}:{port} {socket.gethostname()}"
            print(f"on your own machine: {tunnel}, then open {url}", flush=True)
        elif open_browser:
            Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # w3m waits for us
        with suppress(KeyboardInterrupt):
            server.serve_forever()
        server.is_closing = True
        server.lock.acquire()
        # If Python exits while a thread computes or frees tensors, torch aborts.
        if server.computing is not current_thread():
            server.computing.join()


def new_server(models: Models, port: int) -> Server:
    """Bind a server to a port; if that fails, raise UserError with a free one."""
    try:
        return Server(port, models)
    except (OSError, OverflowError):
        with Server(0, models) as other:
            free = other.server_port
        raise UserError(f"--port {port} is taken or not allowed: use --port {free}") from None
