import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { type Connection, Live } from "./live";
import { snapshot } from "./sample";

class Stream extends EventTarget {
  static all: Stream[] = [];
  closed = false;

  constructor(readonly url: string) {
    super();
    Stream.all.push(this);
  }

  close() {
    this.closed = true;
  }

  say(every_seconds = 1) {
    this.dispatchEvent(new MessageEvent("snapshot", { data: JSON.stringify(snapshot({ every_seconds })) }));
  }
}

const seen: Connection[] = [];
let came = 0;

function started(): Stream {
  new Live({ snapshot: () => came++, connection: (connection) => seen.push(connection) }).connect();
  return Stream.all[0]!;
}

beforeEach(() => {
  vi.useFakeTimers();
  Stream.all = [];
  seen.length = 0;
  came = 0;
  vi.stubGlobal("EventSource", Stream);
  vi.stubGlobal("fetch", () => Promise.resolve(new Response("Give the token once.", { status: 401 })));
});

afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

test("a stream that breaks is closed, says why, and is tried again", async () => {
  const stream = started();
  stream.say();
  stream.dispatchEvent(new Event("error"));
  await vi.advanceTimersByTimeAsync(0);
  expect(stream.closed).toBe(true);
  expect(seen.at(-1)).toMatchObject({ state: "lost", reason: "Give the token once." });
  await vi.advanceTimersByTimeAsync(600);
  expect(Stream.all).toHaveLength(2);
  Stream.all[1]!.say();
  expect(seen.at(-1)).toEqual({ state: "live" });
  expect(came).toBe(2);
});

test("tries come less often, until one succeeds", async () => {
  started();
  for (let attempt = 0; attempt < 6; attempt++) {
    Stream.all.at(-1)!.dispatchEvent(new Event("error"));
    await vi.advanceTimersByTimeAsync(10_001);
  }
  const after = async (wait: number) => {
    const before = Stream.all.length;
    Stream.all.at(-1)!.dispatchEvent(new Event("error"));
    await vi.advanceTimersByTimeAsync(wait);
    return Stream.all.length - before;
  };
  expect(await after(5_000)).toBe(0);
  await vi.advanceTimersByTimeAsync(6_000);
  Stream.all.at(-1)!.say();
  expect(await after(600)).toBe(1);
});

test("a silent stream counts as broken, in a patience that grows with its pace", async () => {
  const stream = started();
  stream.say(1);
  await vi.advanceTimersByTimeAsync(5_900);
  expect(seen.at(-1)).toEqual({ state: "live" });
  await vi.advanceTimersByTimeAsync(200);
  expect(seen.at(-1)).toMatchObject({ state: "lost", reason: "No data for 6 seconds" });
});

test("a slow stream is waited for longer", async () => {
  started().say(30);
  await vi.advanceTimersByTimeAsync(100_000);
  expect(seen.at(-1)).toEqual({ state: "live" });
});
