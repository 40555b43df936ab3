"""The description of the API as a page of plain HTML: no script, and nothing that a browser has to fetch."""

import base64
import hashlib
from collections.abc import Iterable
from html import escape
from http import HTTPStatus
from typing import Any

STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { margin-top: 2rem; }
code { font-family: ui-monospace, monospace; font-size: .9em; }
h3 code { background: var(--soft); padding: .2em .4em; border-radius: .3em; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; }
nav ul { list-style: none; padding: 0; }
"""
_STYLE_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_DIGEST}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
BOUNDS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "up to {}",
    "minLength": "{} characters or more",
    "maxLength": "at most {} characters",
    "minItems": "{} items or more",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} entries",
}


def docs_page(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document. Links are relative, so that a proxy may show it anywhere."""
    info = document["info"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    links = "".join(
        f'<li><a href="#{operation["operationId"]}"><code>{method} {escape(path)}</code></a> '
        f"{escape(operation['summary'])}</li>"
        for method, path, operation in operations
    )
    sections = "".join(_operation(document, *each) for each in operations)
    schemas = "".join(_schema(name, schema) for name, schema in document["components"]["schemas"].items())
    title = escape(f"{info['title']}: the HTTP API")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
        f'<p>{escape(info["description"])}</p><p>{_keys(document)} For programs: <a href="openapi.json">openapi.json'
        f"</a>.</p><nav><ul>{links}</ul></nav><h2>Routes</h2>{sections}<h2>Types</h2>{schemas}</body></html>"
    )


def _keys(document: dict[str, Any]) -> str:
    how = "<code>Authorization: Bearer KEY</code> or <code>X-Api-Key: KEY</code>"
    if {} in document["security"]:
        return "No key is needed here."
    return f"A key is needed, as {how}, where a route does not say otherwise."


def _operation(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    needs_no_key = "" if operation.get("security", True) else " Needs no key."
    parts = [
        f'<h3 id="{operation["operationId"]}"><code>{method} {escape(path)}</code></h3>',
        f"<p>{escape(operation['summary'])}.{needs_no_key}</p>",
    ]
    if body := operation.get("requestBody"):
        parts.append(f"<p>Body: {_content(body['content'])}</p>")
    rows = [_response(document, status, response) for status, response in operation["responses"].items()]
    return "".join([*parts, _table(("Status", "Content", ""), rows)])


def _response(document: dict[str, Any], status: str, response: dict[str, Any]) -> tuple[str, str, str]:
    if "$ref" in response:
        response = document["components"]["responses"][_name(response)]
    status_words = f"{status} {HTTPStatus(int(status)).phrase}"
    return escape(status_words), _content(response["content"]), escape(response["description"])


def _content(content: dict[str, Any]) -> str:
    return "<br>".join(f"{_type(each['schema'])}, <code>{escape(kind)}</code>" for kind, each in content.items())


def _schema(name: str, schema: dict[str, Any]) -> str:
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    required = schema.get("required", ())
    fields = sorted(schema["properties"].items(), key=lambda field: field[0] not in required)
    rows = [
        (
            f"<code>{escape(field)}</code>",
            _type(each) + (", required" if field in required else ""),
            escape(each.get("description", "")),
        )
        for field, each in fields
    ]
    return f'<h3 id="type-{escape(name)}"><code>{escape(name)}</code></h3>{about}{_table(("Field", "Type", ""), rows)}'


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table; what is in `rows` is HTML."""
    heads = "".join(f"<th>{each}</th>" for each in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"


def _type(schema: dict[str, Any]) -> str:
    """Return a schema in words, as HTML; that null is taken goes without saying."""
    if "$ref" in schema:
        name = escape(_name(schema))
        return f'<a href="#type-{name}">{name}</a>'
    if "anyOf" in schema:
        kinds = [_type(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(kinds)
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(each))}</code>" for each in schema["enum"])
    kind = f"array of {_type(schema['items'])}" if "items" in schema else escape(schema.get("type", "anything"))
    bounds = [words.format(escape(str(schema[key]))) for key, words in BOUNDS.items() if key in schema]
    return f"{kind} ({', '.join(bounds)})" if bounds else kind


def _name(reference: dict[str, Any]) -> str:
    name: str = reference["$ref"].rpartition("/")[2]
    return name
