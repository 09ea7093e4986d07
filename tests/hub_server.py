"""A stand-in for the Hugging Face hub, on the loopback: what its client and `datasets` need of it.

It makes repositories, takes uploads, and gives whole files or ranges of them.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
import urllib.parse

REPO = r"/api/(model|dataset)s/([\w-]+/[\w-]+)"


def git_oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubServer(http.server.ThreadingHTTPServer):
    """What the hub knows: repositories, and large files that were uploaded. A context manager."""

    def __init__(self, token=None, handler=None):
        super().__init__(("127.0.0.1", 0), handler or HubHandler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.token = token  # without which nothing is answered
        self.repos = {}  # (type, name): {"visibility", "files": {path: bytes}, "commits"}
        self.large = {}  # by SHA-256, committed or not
        self.asked = []  # every request: method and path
        self.sent = []  # every request's Authorization
        self.head = "a" * 40  # the newest commit
        self.may_write = True
        self.fails = None  # the status of every answer
        self.uploads_left = 10**6
        self.damaged = self.cut = None  # the file that is sent damaged, or in part

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

    def add(self, kind, name, files, visibility=None):
        self.repos[kind, name] = {"visibility": visibility, "files": files, "commits": 0}

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
        self.server.sent.append(sent or "")
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path.startswith("/storage/"):
            return self.storage(path.removeprefix("/storage/"), body)
        is_known = self.server.token is None or sent == f"Bearer {self.server.token}"
        if self.server.fails or not is_known:
            said = {"error": f"bad token {sent}"}
            return self.answer(self.server.fails or 401, said, X_Error_Message=str(said))
        routes = {
            "/api/repos/create": self.create,
            "/api/validate-yaml": lambda _: self.answer(200, {"errors": [], "warnings": []}),
            REPO + "/preupload/main": self.preupload,
            REPO + "/commit/main": self.commit,
            r"/(?:(dataset)s/)?([\w-]+/[\w-]+)\.git/info/lfs/objects/batch": self.batch,
            REPO + r"(?:/revision/(\w+))?": self.info,
            REPO + r"/tree/(\w+)/?(.*)": self.tree,
            r"/(?:(dataset)s/)?([\w-]+/[\w-]+)/resolve/(\w+)/(.+)": self.resolve,
        }
        for pattern, route in routes.items():
            if found := re.fullmatch(pattern, path):
                kind, name, *rest = (*found.groups(), None, None)
                if name is None:
                    return route(body)
                if repo := self.server.repos.get((kind or "model", name)):
                    return route(body, kind or "model", name, repo, *rest[:-2])
        return self.answer(404, {}, X_Error_Code="RepoNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815

    def address(self, kind, name):
        return f"{self.server.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"

    def create(self, body):
        asked = json.loads(body)
        key = asked.get("type", "model"), f"{asked['organization']}/{asked['name']}"
        if not self.server.may_write:
            return self.answer(403, {"error": f"{self.server.token} may not write"})
        if key in self.server.repos:
            return self.answer(409, {"error": "it exists", "url": self.address(*key)})
        self.server.add(*key, {}, asked.get("visibility"))
        return self.answer(200, {"url": self.address(*key)})

    def preupload(self, body, kind, name, repo):
        answers = []
        for asked in json.loads(body)["files"]:
            is_large = asked["path"].endswith((".npy", ".safetensors"))
            content = repo["files"].get(asked["path"])
            hashed = hashlib.sha256(content or b"").hexdigest() if is_large else None
            oid = None if content is None else hashed or git_oid(content)
            mode = "lfs" if is_large else "regular"
            answers.append(
                {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
            )
        return self.answer(200, {"files": answers})

    def batch(self, body, kind, name, repo):
        objects = []
        for asked in json.loads(body)["objects"]:
            href = f"{self.server.endpoint}/storage/{asked['oid']}"
            actions = {} if asked["oid"] in self.server.large else {"upload": {"href": href}}
            objects.append({**asked, **({"actions": actions} if actions else {})})
        return self.answer(200, {"transfer": "basic", "objects": objects})

    def storage(self, name, body):
        """A large file is uploaded."""
        self.server.uploads_left -= 1
        if self.server.uploads_left < 0:
            return self.answer(400)
        assert hashlib.sha256(body).hexdigest() == name
        self.server.large[name] = body
        return self.answer(200)

    def commit(self, body, kind, name, repo):
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repo["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo["files"][value["path"]] = self.server.large[value["oid"]]
        repo["commits"] += 1
        url = f"{self.address(kind, name)}/commit/{self.server.head}"
        return self.answer(200, {"commitUrl": url, "commitOid": "a" * 40, "pullRequestUrl": None})

    def info(self, body, kind, name, repo, revision):
        if revision not in (None, "main", "v1") and len(revision) < 40:
            return self.answer(404, {}, X_Error_Code="RevisionNotFound")
        siblings = [{"rfilename": path} for path in repo["files"]]
        sha = revision if revision and len(revision) == 40 else self.server.head
        return self.answer(200, {"id": name, "sha": sha, "siblings": siblings})

    def tree(self, body, kind, name, repo, commit, folder):
        entries = {}
        for path, content in repo["files"].items():
            if not folder or path.startswith(folder + "/"):
                depth = folder.count("/") + 1 if folder else 0
                is_recursive = "recursive=true" in self.path.lower()
                child = path if is_recursive else "/".join(path.split("/")[: depth + 1])
                is_file = {"type": "file", "size": len(content)}
                oid = hashlib.sha1(child.encode()).hexdigest()
                of_kind = is_file if child == path else {"type": "directory"}
                entries[child] = {"path": child, "oid": oid, **of_kind}
        return self.answer(200, list(entries.values()))

    def resolve(self, body, kind, name, repo, commit, path):
        content = repo["files"].get(path)
        if content is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        tag = hashlib.sha1(content).hexdigest()
        if self.server.damaged == path:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if self.server.cut == path and self.command == "GET":
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            return self.wfile.write(content[: len(content) // 2])
        return self.send_file(content, tag, commit)

    def send_file(self, content, tag, commit="main"):
        """A file, or the range of it that is asked for."""
        commit = self.server.head if commit in ("main", "v1") else commit
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            span = f"bytes {start}-{end}/{len(content)}"
            return self.answer(206, content[start : end + 1], **headers, Content_Range=span)
        return self.answer(200, content, **headers)
