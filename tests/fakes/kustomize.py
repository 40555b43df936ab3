"""What `kubectl kustomize` makes of a directory, as far as deploy/kubernetes goes: a test compares the two.

Resources, components, the namespace, images' tags, and strategic merge patches. Anything else is refused.
"""

from pathlib import Path
from typing import Any

import yaml

KNOWN_FIELDS = {"apiVersion", "kind", "namespace", "resources", "components", "images", "patches"}
CLUSTER_WIDE = ("Namespace",)
# What tells the items of a list apart; lists of anything else are replaced.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
}
ADDED_TO = ("volumes", "volumeMounts")  # a container or a variable that is not there yet is a misspelt one

Manifest = dict[str, Any]


def build(directory: Path) -> list[Manifest]:
    """Return the manifests that `directory`, with a kustomization.yaml, stands for."""
    return _apply(directory, [])


def _apply(directory: Path, manifests: list[Manifest]) -> list[Manifest]:
    wanted = yaml.safe_load((directory / "kustomization.yaml").read_text())
    assert wanted.keys() <= KNOWN_FIELDS, directory
    for name in wanted.get("resources", []):
        path = directory / name
        manifests = manifests + (build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text())))
    for name in wanted.get("components", []):
        manifests = _apply(directory / name, manifests)
    for patch in wanted.get("patches", []):
        text = patch["patch"] if "patch" in patch else (directory / patch["path"]).read_text()
        manifests = _patched(manifests, yaml.safe_load(text))
    for image in wanted.get("images", []):
        manifests = [_with_tag(manifest, image["name"], image["newTag"]) for manifest in manifests]
    if "namespace" in wanted:
        manifests = [_in_namespace(manifest, wanted["namespace"]) for manifest in manifests]
    return manifests


def _patched(manifests: list[Manifest], patch: Manifest) -> list[Manifest]:
    [target] = [manifest for manifest in manifests if name_of(manifest) == name_of(patch)]
    others = [manifest for manifest in manifests if manifest is not target]
    return others if patch.get("$patch") == "delete" else [*others, merged(target, patch)]


def name_of(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def merged(old: Any, new: Any, field: str = "") -> Any:
    """Return `old`, changed by a strategic merge patch; a null takes a field away."""
    if isinstance(old, dict) and isinstance(new, dict):
        kept = {name: value for name, value in old.items() if name not in new}
        return kept | {name: merged(old.get(name), value, name) for name, value in new.items() if value is not None}
    if isinstance(old, list) and (key := MERGE_KEYS.get(field)):
        patches = {item[key]: item for item in new}
        known = {item[key] for item in old}
        added = [item for item in new if item[key] not in known]
        assert not added or field in ADDED_TO, f"nothing to patch in {field}"
        return [merged(item, patches[item[key]]) if item[key] in patches else item for item in old] + added
    return new


def _with_tag(node: Any, name: str, tag: str) -> Any:
    if isinstance(node, list):
        return [_with_tag(item, name, tag) for item in node]
    if not isinstance(node, dict):
        return node
    changed = {key: _with_tag(value, name, tag) for key, value in node.items()}
    return changed | {"image": f"{name}:{tag}"} if changed.get("image") == name else changed


def _in_namespace(manifest: Manifest, namespace: str) -> Manifest:
    if manifest["kind"] in CLUSTER_WIDE:
        return manifest
    return manifest | {"metadata": manifest["metadata"] | {"namespace": namespace}}
