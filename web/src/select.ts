type Listener = (id: string) => void;

/** The operator of a plan, by place and key, that is selected; all views of the plan follow it. */
export class Selection {
  private readonly listeners: Listener[] = [];

  follow(listener: Listener): void {
    this.listeners.push(listener);
  }

  select(id: string): void {
    this.listeners.forEach((listener) => listener(id));
  }
}
