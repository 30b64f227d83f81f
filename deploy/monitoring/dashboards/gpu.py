"""The GPUs and the machines they are in: dcgm-exporter with its default counters, and node-exporter."""

from grafana import dashboard, query, row, series, stat, table, variable

GPU = 'kubernetes_node=~"$node", gpu=~"$gpu"'
LEGEND = "{{kubernetes_node}} GPU {{gpu}}"
RATE = "$__rate_interval"
MIB = 1024 * 1024

VARIABLES = [
    variable("node", "Node", "label_values(DCGM_FI_DEV_GPU_UTIL, kubernetes_node)", everything=".*"),
    variable("gpu", "GPU", 'label_values(DCGM_FI_DEV_GPU_UTIL{kubernetes_node=~"$node"}, gpu)', everything=".*"),
]

USED = f"DCGM_FI_DEV_FB_USED{{{GPU}}}"
FREE = f"DCGM_FI_DEV_FB_FREE{{{GPU}}}"
POWER = f"sum(DCGM_FI_DEV_POWER_USAGE{{{GPU}}})"


def overview():
    faults = (
        f"count((DCGM_FI_DEV_XID_ERRORS{{{GPU}}} > 0) or (DCGM_FI_DEV_ROW_REMAP_FAILURE{{{GPU}}} > 0)) or vector(0)"
    )
    return row(
        "Now",
        stat("GPUs", "short", f"count(DCGM_FI_DEV_GPU_UTIL{{{GPU}}})"),
        stat("Utilisation", "percent", f"avg(DCGM_FI_DEV_GPU_UTIL{{{GPU}}})", top=100),
        stat("Memory used", "bytes", f"sum({USED}) * {MIB}"),
        stat("Hottest", "celsius", f"max(DCGM_FI_DEV_GPU_TEMP{{{GPU}}})", limits=(80, 85)),
        stat("Power", "watt", POWER),
        stat("Faulty", "short", faults, limits=(0.5, 1), help="GPUs with an XID error or a failed row remapping."),
    )


def gpus():
    share = f"{USED} / ({USED} + {FREE})"
    return row(
        "GPUs",
        series("Utilisation", "percent", query(f"DCGM_FI_DEV_GPU_UTIL{{{GPU}}}", LEGEND), top=100),
        series("Memory copy utilisation", "percent", query(f"DCGM_FI_DEV_MEM_COPY_UTIL{{{GPU}}}", LEGEND), top=100),
        series("Memory used", "percentunit", query(share, LEGEND), top=1),
        series(
            "Memory",
            "bytes",
            query(f"{USED} * {MIB}", LEGEND + " used"),
            query(f"{FREE} * {MIB}", LEGEND + " free"),
        ),
        series(
            "Temperature",
            "celsius",
            query(f"DCGM_FI_DEV_GPU_TEMP{{{GPU}}}", LEGEND),
            query(f"DCGM_FI_DEV_MEMORY_TEMP{{{GPU}}}", LEGEND + " memory"),
            limits=(80, 85),
        ),
        series("Power", "watt", query(f"DCGM_FI_DEV_POWER_USAGE{{{GPU}}}", LEGEND)),
        series(
            "Clocks",
            "hertz",
            query(f"DCGM_FI_DEV_SM_CLOCK{{{GPU}}} * 1e6", LEGEND + " SM"),
            query(f"DCGM_FI_DEV_MEM_CLOCK{{{GPU}}} * 1e6", LEGEND + " memory"),
            help="A clock that falls under load is a thermal or a power limit.",
        ),
        series("PCIe replays", "ops", query(f"rate(DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{GPU}}}[{RATE}])", LEGEND)),
        series(
            "Last XID error",
            "short",
            query(f"DCGM_FI_DEV_XID_ERRORS{{{GPU}}}", LEGEND),
            help="The number of the driver's last error message; 0 is none.",
        ),
    )


def steps():
    """Of servers on a GPU: nobody else tells these."""
    pod = "{{pod}} {{model_name}}"
    replayed = 'octavo_cuda_graph_steps_total{mode="replayed"}'
    graphs = f"sum by (pod) (rate({replayed}[{RATE}])) / sum by (pod) (rate(octavo_cuda_graph_steps_total[{RATE}]))"
    return row(
        "Steps",
        series(
            "Memory bandwidth reached",
            "percentunit",
            query("octavo_step_bandwidth_utilization", pod),
            top=1,
            help="Share of the device's limit that the latest steps reached while they ran, by the model's cost.",
        ),
        series(
            "Arithmetic reached",
            "percentunit",
            query("octavo_step_flops_utilization", pod),
            top=1,
            help="Share of the device's limit that the latest steps reached while they ran, by the model's cost.",
        ),
        series("Steps replayed as graphs", "percentunit", query(graphs, "{{pod}}"), top=1),
        series("Memory of the server", "bytes", query('octavo_device_memory_bytes{kind!="total"}', "{{pod}} {{kind}}")),
    )


def energy():
    tokens = f"sum(rate(vllm:generation_tokens_total[{RATE}]))"
    counted = f"sum(rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{GPU}}}[{RATE}])) / 1000"
    return row(
        "Energy",
        series(
            "Energy per generated token",
            "joule",
            query(f"{POWER} / ({tokens} > 0)", "power / tokens"),
            width=12,
            help="Of the GPUs chosen above, for the tokens of all servers: choose all that serve.",
        ),
        # The counter is in millijoules.
        series("Power by the energy counter", "watt", query(counted, "all GPUs"), width=12),
    )


def health():
    remapped = "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"
    columns = [
        ("Busy", "percent", f"DCGM_FI_DEV_GPU_UTIL{{{GPU}}}"),
        ("Temperature", "celsius", f"DCGM_FI_DEV_GPU_TEMP{{{GPU}}}"),
        ("Memory used", "bytes", f"{USED} * {MIB}"),
        ("Power", "watt", f"DCGM_FI_DEV_POWER_USAGE{{{GPU}}}"),
        ("XID", "short", f"DCGM_FI_DEV_XID_ERRORS{{{GPU}}}"),
        ("Remapped rows", "short", f"{remapped}{{{GPU}}}"),
        ("Remapping failed", "short", f"DCGM_FI_DEV_ROW_REMAP_FAILURE{{{GPU}}}"),
    ]
    by = "sum by (kubernetes_node, gpu, modelName) "
    return row(
        "State",
        table(
            "GPUs",
            [(name, unit, f"{by}({expr})") for name, unit, expr in columns],
            rename={"kubernetes_node": "Node", "gpu": "GPU", "modelName": "Model"},
            width=24,
        ),
    )


def machines():
    busy = f'1 - avg by (instance) (rate(node_cpu_seconds_total{{mode="idle"}}[{RATE}]))'
    memory = "1 - node_memory_MemAvailable_bytes / node_memory_MemTotal_bytes"
    network = f'sum by (instance) (rate(node_network_%s_bytes_total{{device!="lo"}}[{RATE}]))'
    disk = f"sum by (instance) (rate(node_disk_%s_bytes_total[{RATE}]))"
    return row(
        "Machines",
        series("Processors", "percentunit", query(busy, "{{instance}}"), top=1, width=12),
        series("Memory", "percentunit", query(memory, "{{instance}}"), top=1, width=12),
        series(
            "Network",
            "Bps",
            query(network % "receive", "{{instance}} received"),
            query(network % "transmit", "{{instance}} sent"),
            width=12,
        ),
        series(
            "Disks",
            "Bps",
            query(disk % "read", "{{instance}} read"),
            query(disk % "written", "{{instance}} written"),
            width=12,
        ),
    )


def board():
    """The dashboard."""
    return dashboard(
        "octavo-gpu",
        "Octavo: GPUs and machines",
        "GPUs from dcgm-exporter's default counters, machines from node-exporter.",
        VARIABLES,
        overview(),
        gpus(),
        steps(),
        energy(),
        health(),
        machines(),
    )
