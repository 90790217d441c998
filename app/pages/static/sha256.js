// SHA-256 (FIPS 180-4) for pages served over plain HTTP, where browsers have no `crypto.subtle`.
window.sha256 = (() => {
  "use strict";

  const fraction = (number) => ((number - Math.floor(number)) * 2 ** 32) >>> 0;
  const primes = [];
  for (let number = 2; primes.length < 64; number++) if (primes.every((prime) => number % prime)) primes.push(number);
  const ROUND = Int32Array.from(primes, (prime) => fraction(Math.cbrt(prime)) | 0);
  const START = Int32Array.from(primes.slice(0, 8), (prime) => fraction(Math.sqrt(prime)) | 0);

  // Words are signed, so that engines compute with integers.
  const turn = (word, bits) => (word >>> bits) | (word << (32 - bits));

  const mix = (state, view, at, words) => {
    for (let i = 0; i < 16; i++) words[i] = view.getInt32(at + 4 * i);
    for (let i = 16; i < 64; i++) {
      const [early, late] = [words[i - 15], words[i - 2]];
      const small = turn(early, 7) ^ turn(early, 18) ^ (early >>> 3);
      words[i] = (words[i - 16] + small + words[i - 7] + (turn(late, 17) ^ turn(late, 19) ^ (late >>> 10))) | 0;
    }
    let a = state[0], b = state[1], c = state[2], d = state[3];
    let e = state[4], f = state[5], g = state[6], h = state[7];
    for (let i = 0; i < 64; i++) {
      const first = (h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + ROUND[i] + words[i]) | 0;
      const second = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g;
      g = f;
      f = e;
      e = (d + first) | 0;
      d = c;
      c = b;
      b = a;
      a = (first + second) | 0;
    }
    state.set([state[0] + a, state[1] + b, state[2] + c, state[3] + d]);
    state.set([state[4] + e, state[5] + f, state[6] + g, state[7] + h], 4);
  };

  // Returns the digest of an ArrayBuffer, as `crypto.subtle.digest` does.
  return (buffer) => {
    const [state, words] = [START.slice(), new Int32Array(64)];
    const whole = buffer.byteLength - (buffer.byteLength % 64);
    const view = new DataView(buffer);
    for (let at = 0; at < whole; at += 64) mix(state, view, at, words);
    const rest = new Uint8Array(buffer, whole);
    const end = new DataView(new ArrayBuffer(rest.length < 56 ? 64 : 128));
    new Uint8Array(end.buffer).set(rest);
    end.setUint8(rest.length, 128);
    end.setBigUint64(end.byteLength - 8, BigInt(buffer.byteLength) * 8n);
    for (let at = 0; at < end.byteLength; at += 64) mix(state, end, at, words);
    const digest = new DataView(new ArrayBuffer(32));
    state.forEach((word, i) => digest.setInt32(4 * i, word));
    return digest.buffer;
  };
})();
