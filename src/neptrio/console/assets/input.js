// The part of the form that makes one input tensor: typed values, a file, or an image.

import { choice, field, make } from "./dom.js";
import { bytes } from "./figures.js";
import { elements, firstShape, imageShape, parseShape, parseValues, pixels, repeated, SIZES } from "./tensors.js";

const MOST_TYPED = 1 << 20; // elements that are made from typed values

export class InputForm {
  /** `metadata`: {name, datatype, shape}. `changed` is called when a file has been read. */
  constructor(metadata, { optional, batching, changed }) {
    this.metadata = metadata;
    this.optional = optional;
    this.changed = changed;
    this.file = null; // {name, bytes}
    this.picture = null; // {name, width, height, bitmap}
    const { datatype, shape } = metadata;
    const image = datatype === "BYTES" ? null : imageShape(batching ? shape.slice(1) : shape);
    const ways = ["values", "file", ...(image ? ["image"] : [])];
    this.way = choice(ways, "values", { "aria-label": `How to give ${metadata.name}`, onchange: () => this.#show() });
    this.used = make("input", { type: "checkbox", checked: !optional });
    this.shape = make("input", { value: firstShape(shape).join(", "), "aria-label": `Shape of ${metadata.name}`, spellcheck: "false" });
    this.text = make("textarea", { rows: datatype === "BYTES" ? 2 : 3, spellcheck: "false", "aria-label": `Values of ${metadata.name}` });
    this.text.value = this.#first(datatype, elements(firstShape(shape)));
    this.chosen = make("input", { type: "file", "aria-label": `File for ${metadata.name}`, onchange: () => this.#read() });
    this.layout = choice(["CHW", "HWC"], image?.layout, { "aria-label": "Layout" });
    this.scale = choice(["0 … 1", "0 … 255"], datatype.startsWith("FP") || datatype === "BF16" ? "0 … 1" : "0 … 255", { "aria-label": "Range of values" });
    this.preview = make("canvas", { class: "preview", width: 96, height: 96, hidden: true, role: "img", "aria-label": "The image as it will be sent" });
    this.note = make("p", { class: "help" });
    this.picking = make("div", { class: "row" }, field("File", this.chosen), ...(image ? [this.layoutField = field("Layout", this.layout), this.scaleField = field("Values", this.scale)] : []), this.preview);
    this.typed = field("Values", this.text, datatype === "BYTES" ? "One string a line, or a JSON array." : "With commas or spaces; a single value or a short row is repeated to fill the shape.");
    this.element = make("fieldset", { class: "input" },
      make("legend", {}, optional ? make("label", { class: "check" }, this.used, metadata.name) : metadata.name, make("span", { class: "type" }, `${datatype} [${shape.join(", ")}]`)),
      make("div", { class: "row" }, field("From", this.way), field("Shape", this.shape)), this.typed, this.picking, this.note);
    this.#show();
  }

  #first(datatype, wanted) {
    if (datatype === "BYTES") return Array.from({ length: Math.min(wanted, 8) }, (_, i) => ["hello", "world"][i % 2]).join("\n");
    if (datatype === "BOOL") return "true";
    const row = (length) => Array.from({ length }, (_, i) => i + 1).join(", ");
    return wanted <= 32 ? row(wanted) : "0";
  }

  #show() {
    const way = this.way.value;
    this.typed.hidden = way !== "values";
    this.picking.hidden = way === "values";
    if (this.layoutField) this.layoutField.hidden = this.scaleField.hidden = way !== "image";
    this.preview.hidden = way !== "image" || !this.picture;
    this.chosen.accept = way === "image" ? "image/*" : "";
    this.note.textContent = way === "file" ? (this.metadata.datatype === "BYTES" ? "The file's bytes are one string." : "The file holds the tensor's elements, little endian.") : way === "image" ? "The image is drawn to the size that the shape says, and turned into numbers here." : "";
    if (this.chosen.files?.length) this.#read();
  }

  async #read() {
    const [file] = this.chosen.files;
    this.file = this.picture = null;
    if (!file) { this.changed(); return; }
    try {
      if (this.way.value === "image") {
        this.picture = { name: file.name, bitmap: await createImageBitmap(file) };
        this.note.textContent = `${file.name}: ${this.picture.bitmap.width} × ${this.picture.bitmap.height}`;
      } else {
        this.file = { name: file.name, bytes: new Uint8Array(await file.arrayBuffer()) };
        this.note.textContent = `${file.name}: ${bytes(this.file.bytes.length)}`;
        const size = SIZES[this.metadata.datatype];
        if (size) this.shape.value = firstShape(this.metadata.shape, Math.floor(this.file.bytes.length / size)).join(", ");
      }
    } catch {
      this.note.textContent = `${file.name} cannot be read as ${this.way.value === "image" ? "an image" : "a file"}`;
    }
    this.preview.hidden = !this.picture;
    this.changed();
  }

  /** The tensor as the form has it, null if it is left out. Throws Error. */
  tensor() {
    if (this.optional && !this.used.checked) return null;
    const { name, datatype } = this.metadata;
    try {
      return { name, datatype, ...this.#content(parseShape(this.shape.value)) };
    } catch (error) {
      throw new Error(`${name}: ${error.message}`);
    }
  }

  #content(shape) {
    const { datatype } = this.metadata;
    const wanted = elements(shape);
    if (this.way.value === "file") {
      if (!this.file) throw new Error("choose a file");
      if (datatype === "BYTES") return { shape, values: repeated([this.file.bytes], wanted), file: this.file.name };
      const size = wanted * SIZES[datatype];
      if (this.file.bytes.length !== size) throw new Error(`the shape has ${size} bytes, the file ${this.file.bytes.length}`);
      return { shape, bytes: this.file.bytes, file: this.file.name };
    }
    if (this.way.value === "image") {
      if (!this.picture) throw new Error("choose an image");
      return { shape, ...this.#drawn(shape) };
    }
    if (wanted > MOST_TYPED) throw new Error(`values for ${MOST_TYPED} elements at most can be typed: choose a file`);
    return { shape, values: repeated(parseValues(this.text.value, datatype), wanted) };
  }

  #drawn(shape) {
    const dims = shape.slice(-3);
    const layout = this.layout.value;
    const [channels, height, width] = shape.length < 3 ? [1, ...shape.slice(-2)] : layout === "CHW" ? dims : [dims[2], dims[0], dims[1]];
    if (channels !== 1 && channels !== 3) throw new Error(`an image has 1 or 3 channels, the shape says ${channels} for ${layout}`);
    if (!(width > 0 && height > 0 && width * height <= 1 << 24)) throw new Error("the shape says no size of an image");
    if (elements(shape) !== channels * width * height) throw new Error("one image makes a batch of 1");
    const canvas = new OffscreenCanvas(width, height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(this.picture.bitmap, 0, 0, width, height);
    const { data } = context.getImageData(0, 0, width, height);
    this.preview.getContext("2d").drawImage(canvas, 0, 0, 96, 96);
    const scale = this.scale.value === "0 … 1" ? 255 : 1;
    return { values: pixels(data, width, height, { layout, channels, scale, datatype: this.metadata.datatype }), image: { name: this.picture.name, layout, channels, width, height, scale } };
  }
}
