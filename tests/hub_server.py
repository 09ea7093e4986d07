"""A stand-in for the Hugging Face hub, on the loopback: what its client and `datasets` need of it.

It gives whole files of repositories, or ranges of them.
"""

import hashlib
import http.server
import json
import re
import threading
import urllib.parse

REPO = r"/api/(model|dataset)s/([\w-]+/[\w-]+)"


class HubServer(http.server.ThreadingHTTPServer):
    """What the hub knows: repositories. A context manager."""

    def __init__(self, token=None):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.token = token  # without which nothing is answered
        self.repos = {}  # (type, name): {path: bytes}
        self.asked = []  # every request: method and path
        self.head = "a" * 40  # the newest commit
        self.fails = None  # the status of every answer

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def environment(self, home):
        """What leads the hub's client here; plain transfers, for Xet's protocol is not spoken.

        The machine's own proxy, caches and logins are not used, and a slow answer is waited for.
        """
        where = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "no_proxy": "127.0.0.1"}
        where |= {"HF_HUB_CACHE": f"{home}/hub", "HF_DATASETS_CACHE": f"{home}/datasets"}
        where |= {"HF_TOKEN_PATH": f"{home}/token", "HUGGING_FACE_HUB_TOKEN": ""}
        where |= {"HF_HUB_DOWNLOAD_TIMEOUT": "300", "HF_HUB_ETAG_TIMEOUT": "300"}
        return where | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def add(self, kind, name, files):
        self.repos[kind, name] = files

    def requests(self, method, pattern):
        return [path for asked, path in self.asked if asked == method and re.search(pattern, path)]


class HubHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, code, body=b"", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_request(self):
        path, sent = urllib.parse.unquote(self.path.split("?")[0]), self.headers["Authorization"]
        self.server.asked.append((self.command, path))
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_known = self.server.token is None or sent == f"Bearer {self.server.token}"
        if self.server.fails or not is_known:
            said = {"error": f"bad token {sent}"}
            return self.answer(self.server.fails or 401, said, X_Error_Message=str(said))
        routes = {
            REPO + r"(?:/revision/(\w+))?": self.info,
            REPO + r"/tree/(\w+)/?(.*)": self.tree,
            r"/(?:(dataset)s/)?([\w-]+/[\w-]+)/resolve/(\w+)/(.+)": self.resolve,
        }
        for pattern, route in routes.items():
            if found := re.fullmatch(pattern, path):
                kind, name, *rest = found.groups()
                if files := self.server.repos.get((kind or "model", name)):
                    return route(name, files, *rest)
        return self.answer(404, {}, X_Error_Code="RepoNotFound")

    do_GET = do_HEAD = do_POST = handle_request  # noqa: N815

    def info(self, name, files, revision):
        if revision not in (None, "main", "v1") and len(revision) < 40:
            return self.answer(404, {}, X_Error_Code="RevisionNotFound")
        siblings = [{"rfilename": path} for path in files]
        sha = revision if revision and len(revision) == 40 else self.server.head
        return self.answer(200, {"id": name, "sha": sha, "siblings": siblings})

    def tree(self, name, files, commit, folder):
        entries = {}
        for path, content in files.items():
            if not folder or path.startswith(folder + "/"):
                depth = folder.count("/") + 1 if folder else 0
                is_recursive = "recursive=true" in self.path.lower()
                child = path if is_recursive else "/".join(path.split("/")[: depth + 1])
                is_file = {"type": "file", "size": len(content)}
                oid = hashlib.sha1(child.encode()).hexdigest()
                of_kind = is_file if child == path else {"type": "directory"}
                entries[child] = {"path": child, "oid": oid, **of_kind}
        return self.answer(200, list(entries.values()))

    def resolve(self, name, files, commit, path):
        """A file, or the range of it that is asked for."""
        content = files.get(path)
        if content is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        tag = hashlib.sha1(content).hexdigest()
        commit = self.server.head if commit in ("main", "v1") else commit
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            span = f"bytes {start}-{end}/{len(content)}"
            return self.answer(206, content[start : end + 1], **headers, Content_Range=span)
        return self.answer(200, content, **headers)
