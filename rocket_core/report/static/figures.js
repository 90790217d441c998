// Draws every <figure data-figure> on the page from the data inside it. Nothing here knows where the page came from.
(() => {
  "use strict";

  const KINDS = ["dense", "low_rank", "factored", "sparse", "quantized", "entropy_coded", "profiled"];
  // By kind: colours of Okabe and Ito, which colour-blind people can tell apart, text that is legible on them, a letter.
  const KIND_COLOURS = ["#999999", "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#0072b2", "#d5dbe1"];
  const KIND_INKS = ["#000", "#000", "#000", "#000", "#000", "#fff", "#000"];
  const KIND_LETTERS = ["D", "L", "F", "S", "Q", "E", "·"];
  const percent = (value) => value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;
  const megabytes = (value) => `${(value / 1e6).toPrecision(3)} MB`;
  const short = (value) => (value === null || value === undefined ? "–" : Number(value).toPrecision(3));

  // Of the ticks of a logarithmic axis only those of 1, 2 and 5 have room for a number.
  const logarithmic = (value) =>
    !/^[125](\.0|e)/.test(value.toExponential()) ? "" : value < 1e-3 || value > 1e3 ? value.toExponential(0) : String(Number(value.toPrecision(1)));

  // Black or white, whichever is easier to read on a colour: by the contrast of WCAG.
  function inkOn(colour) {
    const { r, g, b } = d3.rgb(colour);
    const [red, green, blue] = [r, g, b].map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    return (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) ? "#000" : "#fff";
  }

  const common = (data, width) => ({
    width,
    ariaLabel: data.title,
    ariaDescription: data.note,
    style: { background: "transparent", fontSize: "13px", overflow: "visible" },
  });

  function longest(texts) {
    return Math.max(0, ...texts.map((text) => text.length));
  }

  // Up to and with the last dot that all names share.
  function commonPrefix(names) {
    const [first = "", ...others] = names;
    const parts = first.split(".").slice(0, -1);
    let prefix = "";
    for (const part of parts) {
      const longer = `${prefix}${part}.`;
      if (!others.every((name) => name.startsWith(longer))) break;
      prefix = longer;
    }
    return prefix;
  }

  // What a cell of the allocation map shows of a column: its value, colour scale, and text in the cell.
  function measureOf(data, name) {
    const column = data.columns.find((one) => one.name === name);
    if (name === "kind") {
      // Layers that share a dictionary are of the same kind.
      const kind = (row) => KINDS.indexOf(row.kind.split(",")[0]);
      const found = KINDS.map((_, at) => at).filter((at) => data.rows.some((row) => kind(row) === at));
      return {
        value: (row) => KINDS[kind(row)],
        text: (row) => KIND_LETTERS[kind(row)],
        ink: (row) => KIND_INKS[kind(row)],
        color: {
          type: "categorical",
          domain: found.map((at) => KINDS[at]),
          range: found.map((at) => KIND_COLOURS[at]),
          tickFormat: (name) => `${KIND_LETTERS[KINDS.indexOf(name)]} ${name.replace("_", " ")}`,
        },
      };
    }
    const value = (row) => row[name];
    const largest = Math.max(...data.rows.map((row) => value(row) ?? 0));
    const most = column.kind === "fraction" ? 1 : name === "bits_per_weight" ? Math.max(8, largest) : largest || 1;
    const texts = {
      fraction: (number) => `${Math.round(100 * number)}`,
      bytes: (number) => d3.format(".2~s")(number),
      count: (number) => String(number),
      number: (number) => (name === "bits_per_weight" ? number.toFixed(1) : d3.format(".1~e")(number)),
    };
    return {
      value,
      text: (row) => (value(row) === null || value(row) === undefined ? "–" : texts[column.kind](value(row))),
      ink: (row) => (value(row) === null || value(row) === undefined ? "currentColor" : inkOn(d3.interpolateViridis(value(row) / most))),
      color: {
        type: "linear",
        domain: [0, most],
        scheme: "viridis",
        unknown: "transparent",
        ticks: 5,
        tickFormat: column.kind === "fraction" ? "%" : column.kind === "bytes" ? "~s" : column.kind === "number" ? "~g" : undefined,
      },
      label: column.title,
    };
  }

  function allocationMap(data, space) {
    const rows = data.rows;
    const blocks = [...new Set(rows.map((row) => row.block))];
    const projections = [...new Set(rows.map((row) => row.projection))];
    const marginLeft = 24 + 7.2 * longest(projections);
    // While a job runs, blocks are added at the right.
    const isGrowing = rows.some((row) => row.kind === "profiled");
    const width = isGrowing ? Math.min(space, marginLeft + 20 + 72 * blocks.length) : space;
    const cell = (width - marginLeft - 20) / blocks.length;
    const labelled = cell >= 40;
    const measure = measureOf(data, measureFor(data));
    return Plot.plot({
      ...common(data, width),
      marginLeft,
      marginTop: 46,
      marginBottom: 4,
      height: 52 + 30 * projections.length,
      x: { domain: blocks, axis: "top", label: "block →", ticks: blocks.filter((_, at) => cell > 22 || at % 4 === 0), tickSize: 0, labelOffset: 42 },
      y: { domain: projections, label: null, tickSize: 0 },
      color: { ...measure.color, legend: true, marginLeft: 16, marginRight: 20, label: measure.label },
      marks: [
        Plot.cell(rows, {
          x: "block",
          y: "projection",
          fill: measure.value,
          stroke: "currentColor",
          strokeOpacity: 0.25,
          inset: 1,
        }),
        // While a job runs: the layers that are compressed already.
        Plot.cell(rows.filter((row) => row.compressed), { x: "block", y: "projection", fill: "none", stroke: "currentColor", strokeWidth: 3, inset: 2 }),
        labelled
          ? Plot.text(rows, {
              x: "block",
              y: "projection",
              text: measure.text,
              fill: measure.ink,
              pointerEvents: "none",
            })
          : null,
        Plot.tip(rows, Plot.pointer({
          x: "block",
          y: "projection",
          title: (row) =>
            (row.kept_fraction === null
              ? [row.layer, "profiled; nothing is chosen for it yet"]
              : [
                  row.layer,
                  `${row.kind}, ${percent(row.kept_fraction)} kept`,
                  `${short(row.bits_per_weight)} bits per weight, ${d3.format(",")(row.stored_bytes)} bytes`,
                  `rank ${row.rank ?? "–"}`,
                  `zeros ${percent(row.sparsity)}`,
                  `error ${short(row.error)}`,
                  ...(row.loss === null ? [] : [`predicted increase of the loss ${short(row.loss)}`]),
                ]
            ).join("\n"),
        })),
      ],
    });
  }

  function expertMap(data, width) {
    const rows = data.rows;
    const blocks = [...new Set(rows.map((row) => row.block))];
    const experts = [...new Set(rows.map((row) => row.expert))].sort((one, other) => one - other);
    const cell = (width - 70) / blocks.length;
    const height = Math.max(5, Math.min(26, 900 / experts.length));
    const measure = measureOf(data, measureFor(data));
    // Parts of a block's tokens are small where there are many experts.
    if (measureFor(data) === "share") {
      const most = Math.max(...rows.map((row) => row.share)) || 1;
      measure.color.domain = [0, most];
      measure.ink = (row) => (row.share > 0.55 * most ? "#000" : "#fff");
    }
    return Plot.plot({
      ...common(data, width),
      marginLeft: 50,
      marginTop: 46,
      marginBottom: 4,
      height: 52 + height * experts.length,
      x: { domain: blocks, axis: "top", label: "block →", ticks: blocks.filter((_, at) => cell > 22 || at % 4 === 0), tickSize: 0, labelOffset: 42 },
      y: { domain: experts, label: "expert", ticks: experts.filter((_, at) => height > 12 || at % 8 === 0), tickSize: 0 },
      color: { ...measure.color, legend: true, marginLeft: 6, marginRight: 10, label: measure.label },
      marks: [
        Plot.cell(rows, { x: "block", y: "expert", fill: measure.value, stroke: "currentColor", strokeOpacity: 0.25, inset: height > 12 ? 1 : 0 }),
        cell >= 40 && height >= 16
          ? Plot.text(rows, { x: "block", y: "expert", text: measure.text, fill: measure.ink, pointerEvents: "none" })
          : null,
        Plot.tip(rows, Plot.pointer({
          x: "block",
          y: "expert",
          title: (row) =>
            [
              `block ${row.block}, expert ${row.expert}`,
              `${d3.format(",")(row.routed_tokens)} calibration tokens, ${percent(row.share)} of the block's`,
              `${percent(row.kept_fraction)} kept, ${short(row.bits_per_weight)} bits per weight`,
              `error ${short(row.error)}`,
              ...(row.loss === null ? [] : [`predicted increase of the loss ${short(row.loss)}`]),
            ].join("\n"),
        })),
      ],
    });
  }

  function kindScale(rows) {
    const found = KINDS.filter((kind) => rows.some((row) => row.kind === kind));
    return {
      color: { domain: found, range: KIND_COLOURS.filter((_, at) => found.includes(KINDS[at])) },
      symbol: { domain: found, legend: true, tickFormat: (kind) => kind.replace("_", " ") },
    };
  }

  // The axis of what layers kept: codes keep all parameters, in fewer bits.
  function keptAxis(data) {
    if (data.options.by === "bits_per_weight")
      return { label: "bits on disk per weight →", domain: [0, Math.max(8, ...data.rows.map((row) => row.bits_per_weight))] };
    return { label: "kept fraction of the layer's parameters →", domain: [0, 1], tickFormat: "%" };
  }

  function keptText(data, row) {
    return data.options.by === "bits_per_weight" ? `${short(row.bits_per_weight)} bits per weight` : `${percent(row.kept_fraction)} kept`;
  }

  function errorsBySize(data, width) {
    return Plot.plot({
      ...common(data, width),
      marginLeft: 54,
      marginBottom: 52,
      grid: true,
      x: keptAxis(data),
      y: { label: "↑ relative error of the layer's output", zero: true, nice: true },
      ...kindScale(data.rows),
      marks: [
        Plot.dot(data.rows, {
          x: data.options.by,
          y: "error",
          stroke: "kind",
          symbol: "kind",
          tip: { format: { x: false, y: false, stroke: false, symbol: false } },
          title: (row) => `${row.layer}\n${row.kind}, ${keptText(data, row)}\nerror ${short(row.error)}`,
        }),
      ],
    });
  }

  function predictedAndAchieved(data, width) {
    const most = Math.max(0.001, ...data.rows.flatMap((row) => [row.predicted, row.achieved])) * 1.05;
    return Plot.plot({
      ...common(data, width),
      marginLeft: 54,
      marginBottom: 52,
      grid: true,
      x: { label: "predicted error →", domain: [0, most] },
      y: { label: "↑ achieved error", domain: [0, most] },
      ...kindScale(data.rows),
      marks: [
        Plot.line([[0, 0], [most, most]], { stroke: "currentColor", strokeOpacity: 0.4, strokeDasharray: "4 4" }),
        Plot.dot(data.rows, {
          x: "predicted",
          y: "achieved",
          stroke: "kind",
          symbol: "kind",
          tip: { format: { x: false, y: false, stroke: false, symbol: false } },
          title: (row) => `${row.layer}\npredicted ${short(row.predicted)}\nachieved ${short(row.achieved)}`,
        }),
      ],
    });
  }

  function stageTimes(data, width) {
    const energy = (row) => (row.energy_kwh === undefined || row.energy_kwh === null ? "" : `, ${short(1000 * row.energy_kwh)} Wh`);
    const label = (row) => `${short(row.seconds)} s${energy(row)}`;
    return Plot.plot({
      ...common(data, width),
      marginLeft: 16 + 7.2 * longest(data.rows.map((row) => row.stage)),
      marginRight: 12 + 7.2 * longest(data.rows.map(label)),
      marginBottom: 52,
      height: 66 + 28 * data.rows.length,
      x: { label: "seconds →", grid: true },
      y: { label: null, domain: data.rows.map((row) => row.stage), tickSize: 0 },
      marks: [
        Plot.barX(data.rows, { x: "seconds", y: "stage", fill: "#4f8fd6", insetTop: 3, insetBottom: 3 }),
        Plot.text(data.rows, { x: "seconds", y: "stage", text: label, textAnchor: "start", dx: 5 }),
        Plot.ruleX([0]),
      ],
    });
  }

  function sizeFrontier(data, width) {
    // The model without a loss has no place on a logarithmic scale.
    const rows = data.rows.filter((row) => row.error > 0);
    const marked = data.options.marked_bytes;
    const error = data.options.marked_error;
    const nearest = marked === null || marked === undefined || rows.length === 0 || error === 0
      ? []
      : error !== null && error !== undefined
      ? [{ model_bytes: marked, error }]
      : [rows.reduce((best, row) => (Math.abs(row.model_bytes - marked) < Math.abs(best.model_bytes - marked) ? row : best))];
    return Plot.plot({
      ...common(data, width),
      marginLeft: 60,
      marginRight: 30,
      marginBottom: 52,
      height: 300,
      grid: true,
      x: { label: "size of all weights →", tickFormat: megabytes, ticks: Math.max(2, Math.floor(width / 110)) },
      y: { label: "↑ predicted error", type: "log", tickFormat: logarithmic },
      marks: [
        Plot.line(rows, { x: "model_bytes", y: "error", stroke: "#4f8fd6", strokeWidth: 2 }),
        Plot.ruleX(nearest, { x: "model_bytes", stroke: "currentColor", strokeDasharray: "4 4" }),
        Plot.dot(nearest, { x: "model_bytes", y: "error", fill: "#d1752c", r: 6 }),
        Plot.tip(rows, Plot.pointerX({
          x: "model_bytes",
          y: "error",
          title: (row) => `ratio ${row.ratio.toFixed(2)}\n${megabytes(row.model_bytes)}\npredicted error ${short(row.error)}`,
        })),
      ],
    });
  }

  function lossCurve(data, width) {
    const trained = data.rows.filter((row) => row.training !== null);
    const held = data.rows.filter((row) => row.held_out !== null);
    const names = ["text read", "held-out windows"];
    return Plot.plot({
      ...common(data, width),
      marginLeft: 60,
      marginRight: 30,
      marginBottom: 46,
      height: 300,
      grid: true,
      x: { label: "tokens read →", tickFormat: "~s", ticks: Math.max(2, Math.floor(width / 110)), zero: true },
      y: { label: "↑ divergence, nats per token", zero: true },
      color: { domain: names, range: ["#4f8fd6", "#d1752c"], legend: true },
      marks: [
        Plot.line(trained, { x: "tokens", y: "training", stroke: () => names[0], strokeWidth: 1.5 }),
        Plot.line(held, { x: "tokens", y: "held_out", stroke: () => names[1], strokeDasharray: "2 4" }),
        Plot.dot(held, { x: "tokens", y: "held_out", fill: () => names[1], r: 4.5 }),
        Plot.tip(data.rows, Plot.pointerX({
          x: "tokens",
          y: (row) => row.training ?? row.held_out,
          title: (row) =>
            [
              `step ${d3.format(",")(row.step)}, ${d3.format(",")(row.tokens)} tokens`,
              ...(row.training === null ? [] : [`text read ${short(row.training)}`]),
              ...(row.held_out === null ? [] : [`held-out windows ${short(row.held_out)}`]),
            ].join("\n"),
        })),
      ],
    });
  }

  function allocationDifference(data, width) {
    const layers = [...new Set(data.rows.map((row) => row.layer))];
    const prefix = commonPrefix(layers);
    const marginLeft = Math.min(width / 2, 12 + 6.8 * longest(layers.map((layer) => layer.slice(prefix.length))));
    return Plot.plot({
      ...common(data, width),
      marginLeft,
      marginTop: 36,
      height: 60 + 16 * layers.length,
      x: { ...keptAxis(data), axis: "top", grid: true, ticks: Math.max(2, Math.floor((width - marginLeft) / 70)) },
      y: { domain: layers, label: null, tickSize: 0, tickFormat: (layer) => layer.slice(prefix.length) },
      color: { scheme: "Observable10" },
      symbol: { legend: true },
      marks: [
        Plot.ruleY(data.rows, Plot.groupY({ x1: "min", x2: "max" }, { y: "layer", x: data.options.by, strokeOpacity: 0.35 })),
        Plot.dot(data.rows, {
          x: data.options.by,
          y: "layer",
          stroke: "job",
          symbol: "job",
          tip: { format: { x: false, y: false, stroke: false, symbol: false } },
          title: (row) => `${row.layer}\n${row.job}\n${keptText(data, row)}`,
        }),
      ],
    });
  }

  // A scale of powers of ten shows models that lose little next to those that lose much.
  function qualityOverSize(data, width) {
    const name = measureFor(data);
    const rows = data.rows.filter((row) => row[name] > 0);
    const texts = [...new Set(data.rows.map((row) => row.text))];
    const title = data.columns.find((column) => column.name === name).title;
    const [least, most] = d3.extent(rows, (row) => row[name]);
    // Wide enough for a tick that has a number, also for a single point.
    const wider = Math.sqrt(Math.max(1, (2.6 * least) / most));
    // Within less than a decade there is room for the number of every tick.
    const isNarrow = (wider * wider * most) / least < 10;
    const numbered = (value) => (isNarrow ? String(Number(value.toPrecision(2))) : logarithmic(value));
    return Plot.plot({
      ...common(data, width),
      marginLeft: 64,
      marginRight: 30,
      marginBottom: 52,
      height: 340,
      grid: true,
      x: { label: "size of all weights →", tickFormat: megabytes, ticks: Math.max(2, Math.floor(width / 110)), nice: true, inset: 12, labelOffset: 46 },
      y: { label: `↑ ${title}`, type: "log", domain: rows.length ? [least / wider, most * wider] : undefined, tickFormat: numbered, inset: 12 },
      color: { domain: texts, scheme: "Observable10" },
      symbol: { domain: texts, legend: true },
      marks: [
        Plot.dot(rows, {
          x: "model_bytes",
          y: name,
          stroke: "text",
          fill: (row) => (row.is_marked ? row.text : "none"),
          symbol: "text",
          r: 6,
          strokeWidth: 2,
          href: "address",
          title: (row) => `${row.name}\n${title}: ${short(row[name])}\n${row.text}`,
          tip: { format: { x: false, y: false, stroke: false, symbol: false, fill: false, href: false } },
        }),
      ],
    });
  }

  const DRAWN = {
    "allocation-map": allocationMap,
    "expert-map": expertMap,
    "errors-by-size": errorsBySize,
    "predicted-and-achieved": predictedAndAchieved,
    "stage-times": stageTimes,
    "size-frontier": sizeFrontier,
    "loss-curve": lossCurve,
    "allocation-difference": allocationDifference,
    "quality-over-size": qualityOverSize,
  };

  // The measures that somebody chose, by figure, also for those that replace the ones on the page.
  const chosen = new Map();

  function measureFor(data) {
    const name = chosen.get(data.name);
    return data.measures.includes(name) ? name : data.measures[0];
  }

  function offerMeasures(figure) {
    const data = dataOf(figure);
    if (!data.measures || data.measures.length < 2) return;
    const label = document.createElement("label");
    label.className = "measure";
    label.append(data.name === "allocation-map" ? "Coloured by " : "Shows ");
    const select = document.createElement("select");
    for (const name of data.measures) {
      const title = data.columns.find((column) => column.name === name).title;
      select.append(new Option(title, name, false, name === measureFor(data)));
    }
    // Nothing else on the page depends on it, such as a form around it that would be sent again.
    select.addEventListener("input", (event) => event.stopPropagation());
    select.addEventListener("change", (event) => {
      event.stopPropagation();
      chosen.set(data.name, select.value);
      draw(figure);
    });
    label.append(select);
    figure.querySelector(".plot").before(label);
  }

  function dataOf(figure) {
    return JSON.parse(figure.querySelector("script[type='application/json']").textContent);
  }

  function draw(figure) {
    const data = dataOf(figure);
    const place = figure.querySelector(".plot");
    if (data.rows.length === 0 || place.clientWidth === 0) return;
    const chart = DRAWN[data.name](data, Math.max(280, place.clientWidth));
    for (const svg of chart.matches("svg") ? [chart] : chart.querySelectorAll("svg")) {
      // An image has no links.
      if (svg.hasAttribute("aria-label")) svg.setAttribute("role", svg.querySelector("a") ? "group" : "img");
      else svg.setAttribute("aria-hidden", "true");
      // An image has no parts; what Plot says of its own groups is not allowed on them.
      for (const part of svg.querySelectorAll("[aria-label], [aria-description]")) {
        part.removeAttribute("aria-label");
        part.removeAttribute("aria-description");
      }
      for (const link of svg.querySelectorAll("a")) {
        link.setAttribute("aria-label", data.rows.find((row) => row.address === link.href.baseVal).name);
      }
    }
    place.replaceChildren(chart);
  }

  // A figure is drawn when it first has a width, and again whenever that changes.
  const widths = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const width = Math.round(entry.contentRect.width);
      if (entry.target.dataset.drawn === String(width)) continue;
      entry.target.dataset.drawn = String(width);
      draw(entry.target.closest("figure"));
    }
  });

  function watch(root) {
    for (const figure of root.querySelectorAll("figure[data-figure]")) {
      const place = figure.querySelector(".plot");
      if (!place || place.dataset.watched) continue;
      place.dataset.watched = "yes";
      offerMeasures(figure);
      widths.observe(place);
    }
  }

  document.addEventListener("DOMContentLoaded", () => watch(document));
  document.addEventListener("htmx:load", (event) => watch(event.detail.elt.parentElement ?? document));
})();
