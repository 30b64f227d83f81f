"""Nodes without machines: what a kubelet, a GPU operator and a CSI driver would tell the API server."""

import contextlib
import threading
from typing import Any

from control_plane import Api, Refused

Object = dict[str, Any]
LABELS = {
    "nvidia.com/gpu.present": "true",
    "nvidia.com/gpu.compute.major": "7",
    "nvidia.com/gpu.compute.minor": "0",
    # What `CHOICES` of the chart's tests select by.
    "disk": "ssd",
    "a": "b",
}
CLASS = "fast"


def node(name: str, gpus: int) -> Object:
    """A node with GPUs, whole and in slices, and room for anything else."""
    capacity = {"cpu": "256", "memory": "4Ti", "ephemeral-storage": "64Ti", "pods": "200"}
    capacity |= {"nvidia.com/gpu": str(gpus), "nvidia.com/mig-3g.40gb": str(gpus)}
    labels = {**LABELS, "kubernetes.io/hostname": name, "topology.kubernetes.io/zone": f"zone-{int(name[-1]) % 3}"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]},
    }


def add_node(api: Api, name: str, gpus: int) -> None:
    api.ask("/api/v1/nodes", "POST", node(name, gpus))
    # The API server taints a new node until a controller finds it ready.
    api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})


# The status of a pod whose containers run and are ready.
CONDITIONS = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")]
RUNNING = {"status": {"phase": "Running", "conditions": CONDITIONS}}



class Kubelets(threading.Thread):
    """Starts the pods of all nodes, ends those that are deleted, and makes a volume for each claim."""

    def __init__(self, api: Api) -> None:
        super().__init__(daemon=True)
        self.api, self.done = api, threading.Event()
        # The most pods that a node had at the same time, by namespace and node.
        self.most: dict[tuple[str, str], int] = {}

    def run(self) -> None:
        while not self.done.wait(0.2):
            # An object may be gone or changed between two requests; the next round sees it anew.
            with contextlib.suppress(KeyError, Refused, OSError):
                self.pods()
            with contextlib.suppress(KeyError, Refused, OSError):
                self.claims()

    def pods(self) -> None:
        found = self.api.ask("/api/v1/pods")["items"]
        counted: dict[tuple[str, str], int] = {}
        for pod in found:
            if name := pod["spec"].get("nodeName"):
                key = pod["metadata"]["namespace"], name
                counted[key] = counted.get(key, 0) + 1
                self.pod(pod)
        for key, count in counted.items():
            self.most[key] = max(count, self.most.get(key, 0))

    def pod(self, pod: Object) -> None:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        if "deletionTimestamp" in pod["metadata"]:
            self.api.ask(path, "DELETE", {"gracePeriodSeconds": 0})
        elif pod["status"].get("phase") == "Pending":
            self.api.patch(f"{path}/status", RUNNING)

    def claims(self) -> None:
        for claim in self.api.ask("/api/v1/persistentvolumeclaims")["items"]:
            meta, spec = claim["metadata"], claim["spec"]
            if claim["status"].get("phase") == "Pending" and not spec.get("volumeName"):
                with contextlib.suppress(Refused):
                    self.api.ask("/api/v1/persistentvolumes", "POST", volume(meta, spec))

    def close(self) -> None:
        self.done.set()
        self.join()


def volume(meta: Object, spec: Object) -> Object:
    """What a CSI driver would provision for a claim."""
    reference = {"kind": "PersistentVolumeClaim", "namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"pv-{meta['uid']}"},
        "spec": {
            "capacity": spec["resources"]["requests"],
            "accessModes": spec["accessModes"],
            "storageClassName": spec.get("storageClassName", ""),
            "claimRef": reference,
            "persistentVolumeReclaimPolicy": "Delete",
            "csi": {"driver": "csi.test", "volumeHandle": meta["uid"]},
        },
    }


# What the compositions refer to.
SURROUNDINGS = f"""
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata:
  name: {CLASS}
  annotations: {{storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: csi.test
allowVolumeExpansion: true
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {{name: nvidia}}
handler: nvidia
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {{name: serving}}
value: 1000
"""
