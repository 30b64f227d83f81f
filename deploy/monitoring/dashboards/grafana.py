"""How a dashboard is written down: panels laid out from left to right, rows, variables."""

WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Colours of a value that is better small: fine, worth a look, bad.
STEPS = ("green", "orange", "red")


def query(expr, legend="", **more):
    """One query of a panel; `more` are further fields of the target."""
    return {"expr": " ".join(expr.split()), "legendFormat": legend, **more}


def panel(kind, title, unit, queries, *, help="", width=8, height=8, limits=(), decimals=None, top=None, **options):
    """A panel. `limits` are the values at which it turns orange and red; `top` is the end of the axis."""
    colours = [{"color": colour, "value": value} for colour, value in zip(STEPS, (None, *limits))]
    defaults = {"unit": unit, "min": 0, "thresholds": {"mode": "absolute", "steps": colours}}
    if decimals is not None:
        defaults["decimals"] = decimals
    if top is not None:
        defaults["max"] = top
    if kind == "stat":
        defaults["noValue"] = "–"
    if kind == "timeseries":
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": False}
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "editorMode": "code", "range": kind != "table", **target}
        for index, target in enumerate(queries)
    ]
    if kind in ("stat", "table"):
        targets = [{**target, "instant": True, "range": False} for target in targets]
    return {
        "type": kind,
        "title": title,
        "description": help,
        "datasource": SOURCE,
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {**OPTIONS.get(kind, {}), **options},
        "targets": targets,
    }


OPTIONS = {
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"colorMode": "value", "graphMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]}},
    "heatmap": {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "cellGap": 1,
        "legend": {"show": False},
        "tooltip": {"show": True, "yHistogram": True},
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}


def stat(title, unit, expr, **more):
    """One number."""
    return panel("stat", title, unit, [query(expr)], width=more.pop("width", 4), height=4, **more)


def series(title, unit, *queries, **more):
    """Lines over time."""
    return panel("timeseries", title, unit, queries, **more)


def quantiles(title, histogram, by, selector, quantiles=(0.5, 0.95, 0.99), unit="s", **more):
    """Quantiles of a histogram, for each value of the label `by`."""
    buckets = f"sum by ({by}, le) (rate({histogram}_bucket{{{selector}}}[$__rate_interval]))"
    lines = [query(f"histogram_quantile({q}, {buckets})", f"{{{{{by}}}}} p{q * 100:g}") for q in quantiles]
    return series(title, unit, *lines, **more)


def heatmap(title, histogram, selector, unit="s", **more):
    """The buckets of a histogram over time."""
    expr = f"sum by (le) (increase({histogram}_bucket{{{selector}}}[$__rate_interval]))"
    board = panel("heatmap", title, unit, [query(expr, "{{le}}", format="heatmap")], **more)
    board["options"]["yAxis"] = {"unit": unit, "axisPlacement": "left"}
    return board


def table(title, columns, *, hide=(), rename=None, **more):
    """A row for each label set; `columns` are (name, unit, expression)."""
    board = panel("table", title, "short", [query(expr, format="table") for _, _, expr in columns], **more)
    names = {f"Value #{chr(ord('A') + index)}": name for index, (name, _, _) in enumerate(columns)}
    if len(columns) == 1:
        names = {"Value": columns[0][0]}
    board["transformations"] = [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {name: True for name in ("Time", "__name__", *hide)},
                "renameByName": {**(rename or {}), **names},
            },
        },
    ]
    board["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
        for name, unit, _ in columns
    ]
    return board


def row(title, *panels):
    """A headed row of panels."""
    heading = {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"w": WIDTH, "h": 1}}
    return [heading, *panels]


def variable(name, label, values, *, everything=None):
    """A choice of label values, several at once. `everything` stands for All where the label may be missing."""
    more = {} if everything is None else {"allValue": everything}
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "query": {"query": values, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        **more,
    }


def dashboard(uid, title, description, variables, *rows):
    """The whole, with every panel numbered and placed."""
    panels = []
    x = y = tallest = 0
    for identity, item in enumerate((panel for row in rows for panel in row), start=1):
        width, height = item["gridPos"]["w"], item["gridPos"]["h"]
        if x + width > WIDTH or item["type"] == "row":
            x, y, tallest = 0, y + tallest, 0
        panels.append({"id": identity, **item, "gridPos": {"h": height, "w": width, "x": x, "y": y}})
        x, tallest = x + width, max(tallest, height)
    source = {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "refresh": 1,
        "current": {},
    }
    others = {
        "type": "dashboards",
        "title": "Octavo",
        "tags": ["octavo"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["octavo"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [others],
        "templating": {"list": [source, *variables]},
        "annotations": {"list": []},
        "panels": panels,
    }
