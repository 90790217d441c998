// Uploads from the form of a new job: a calibration file, or a model's folder in pieces, which resumes.
(() => {
  "use strict";

  const TYPES = { ".txt": "text/plain", ".jsonl": "application/jsonl" };
  // Small enough for a progress that moves.
  const PIECE_BYTES = 8 * 2 ** 20;

  const token = () => JSON.parse(document.body.getAttribute("hx-headers") || "{}");

  const ask = async (method, path, options = {}) => {
    const headers = { Accept: "application/json", ...token(), ...options.headers };
    const answer = await fetch(`/ui${path}`, { method, headers, body: options.body, credentials: "same-origin" });
    const content = answer.status === 204 ? null : await answer.json();
    if (!answer.ok) throw new Error(content.detail);
    return content;
  };

  const suffix = (name) => name.slice(name.lastIndexOf(".")).toLowerCase();

  const sizeText = (bytes) => (bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} kB` : bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`);

  const sendCalibration = async ([{ file }], show) => {
    const type = TYPES[suffix(file.name)];
    if (!type) throw new Error(`${file.name} is neither .txt nor .jsonl; the command rocket upload converts and sends .json, .csv and .parquet`);
    show(`sending ${file.name}`, 0);
    const upload = await ask("POST", `/calibrations?name=${encodeURIComponent(file.name)}`, { headers: { "Content-Type": type }, body: file });
    const select = document.getElementById("dataset");
    const known = [...select.options].find((option) => option.value === upload.id);
    const option = known || select.appendChild(new Option(`${upload.name || upload.id} (your upload)`, upload.id));
    option.selected = true;
    select.dispatchEvent(new Event("change", { bubbles: true }));
    show(`${upload.name || file.name}: ${upload.documents} ${upload.documents === 1 ? "document" : "documents"}, chosen above`, 1);
  };

  const patterns = (text) =>
    text.split(" ").map((glob) => new RegExp(`^${glob.replace(/[.+^${}()|\\]/g, "\\$&").replace(/\*/g, "[^/]*")}$`));

  const isWeights = (path) => path.endsWith(".safetensors") && !path.includes("/");

  // As the library: one file if there is one, or else those of the index.
  const partsOf = (files, zone) => {
    const wanted = patterns(zone.dataset.parts);
    const others = patterns(zone.dataset.others);
    const parts = files.filter(({ path }) => wanted.some((one) => one.test(path)) && !others.some((one) => one.test(path)));
    const single = parts.some(({ path }) => path === "model.safetensors");
    return parts
      .filter(({ path }) => !single || !isWeights(path) || path === "model.safetensors")
      .sort((one, other) => isWeights(one.path) - isWeights(other.path) || one.path.localeCompare(other.path));
  };

  const headBytes = async (file) => {
    const start = new DataView(await file.slice(0, 8).arrayBuffer());
    return Math.min(file.size, start.byteLength === 8 ? 8 + Number(start.getBigUint64(0, true)) : 0);
  };

  // The bytes that have arrived must be those of this file, or two models would be mixed.
  const checkArrived = async (name, path, file, show) => {
    let start = 0;
    for (const piece of (await ask("GET", `/models/${name}/files/${path}`)).pieces) {
      const content = await file.slice(start, start + piece.size).arrayBuffer();
      const digest = crypto.subtle ? await crypto.subtle.digest("SHA-256", content) : sha256(content);
      show(`comparing ${path} with what the server has`, start / file.size);
      const text = [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
      if (text !== piece.sha256) throw new Error(`${path} is not the file of which the server has the beginning; upload it under another name`);
      start += piece.size;
    }
  };

  const sendModel = async (files, show, zone) => {
    const parts = partsOf(files, zone);
    const name = files.name.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[.-]+|[.-]+$/g, "").replace(/([.-])\1+/g, "$1");
    const announced = parts.map(({ path, file }) => ({ path, size: file.size }));
    const model = await ask("POST", "/models", { headers: { "Content-Type": "application/json" }, body: JSON.stringify({ name, files: announced }) });
    const arrived = Object.fromEntries(model.files.map((file) => [file.path, file]));
    for (const { path, file } of parts) if (arrived[path].received) await checkArrived(name, path, file, show);
    let done = model.received;
    const send = async (path, file, stop) => {
      while (arrived[path].received < stop) {
        const start = arrived[path].received;
        const end = Math.min(stop, start + Math.min(PIECE_BYTES, model.piece_bytes));
        const headers = { "Content-Type": "application/octet-stream", "Content-Range": `bytes ${start}-${end - 1}/${file.size}` };
        await ask("PUT", `/models/${name}/files/${path}`, { headers, body: file.slice(start, end) });
        arrived[path].received = end;
        done += end - start;
        show(`${sizeText(done)} of ${sizeText(model.size)}, ${path}`, done / model.size);
      }
    };
    for (const { path, file } of parts) await send(path, file, isWeights(path) ? await headBytes(file) : file.size);
    await ask("POST", `/models/${name}/check`);
    for (const { path, file } of parts) await send(path, file, file.size);
    const field = document.getElementById("model_id");
    field.value = model.id;
    field.dispatchEvent(new Event("change", { bubbles: true }));
    show(`${sizeText(model.size)} sent; the model is entered above as ${model.id}`, 1);
  };

  const readFolder = (entry) =>
    new Promise((resolve, reject) => {
      const reader = entry.createReader();
      const found = [];
      const next = () => reader.readEntries((some) => (some.length ? (found.push(...some), next()) : resolve(found)), reject);
      next();
    });

  const fileOf = (entry) => new Promise((resolve, reject) => entry.file(resolve, reject));

  const dropped = async (transfer, kind) => {
    const entries = [...transfer.items].map((item) => item.webkitGetAsEntry && item.webkitGetAsEntry());
    if (kind === "calibration") return [...transfer.files].slice(0, 1).map((file) => ({ path: file.name, file }));
    const folder = entries.find((entry) => entry && entry.isDirectory);
    if (!folder) throw new Error("drop the folder of a model, not its files");
    const files = [];
    for (const entry of await readFolder(folder)) {
      const inner = entry.isDirectory ? await readFolder(entry) : [entry];
      for (const each of inner.filter((one) => one.isFile)) {
        files.push({ path: entry.isDirectory ? `${entry.name}/${each.name}` : each.name, file: await fileOf(each) });
      }
    }
    return Object.assign(files, { name: folder.name });
  };

  const chosen = (input, kind) => {
    const files = [...input.files].map((file) => ({ path: kind === "model" ? file.webkitRelativePath.split("/").slice(1).join("/") : file.name, file }));
    return Object.assign(files, { name: input.files[0].webkitRelativePath.split("/")[0] });
  };

  const start = (zone) => {
    const kind = zone.dataset.drop;
    const input = zone.querySelector("input");
    const [bar, status] = [zone.querySelector("progress"), zone.querySelector("[role=status]")];
    const show = (text, fraction) => {
      status.className = "small";
      status.textContent = text;
      bar.hidden = fraction === 1;
      bar.value = fraction;
    };
    const send = async (collect) => {
      if (input.disabled) return;
      input.disabled = true;
      try {
        await { calibration: sendCalibration, model: sendModel }[kind](await collect(), show, zone);
      } catch (error) {
        bar.hidden = true;
        status.className = "small bad";
        status.textContent = error instanceof TypeError ? "the server does not answer; choose the same again to continue" : error.message;
      }
      input.disabled = false;
      input.value = "";
    };
    zone.hidden = false;
    input.addEventListener("change", (event) => {
      event.stopPropagation();
      if (input.files.length) send(async () => chosen(input, kind));
    });
    zone.addEventListener("dragover", (event) => {
      event.preventDefault();
      zone.classList.add("over");
    });
    zone.addEventListener("dragleave", () => zone.classList.remove("over"));
    zone.addEventListener("drop", (event) => {
      event.preventDefault();
      zone.classList.remove("over");
      const files = dropped(event.dataTransfer, kind);
      send(() => files);
    });
  };

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("[data-drop]").forEach(start));
})();
