"""Parser of HTML pages for tests."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Checks that every element is closed, and collects text and kinds of rectangles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.words, self.rectangles = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag == "rect":
            self.rectangles.append(dict(attributes).get("class"))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
