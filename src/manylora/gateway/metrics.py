"""The gateway's own metrics. No label carries a name that a caller can choose: the scrape needs no key."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from manylora.telemetry import Metrics

# Finer below 10 ms, where the gateway's own share lies; up to minutes, where long answers lie.
SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class ExchangeSeries:
    """The series of one kind of exchange, found once instead of for every request."""

    requests: Counter
    seconds: Histogram
    first_byte_seconds: Histogram
    response_bytes: Counter


class GatewayMetrics(Metrics):
    """Counters and histograms of one gateway app."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.counter("gateway_requests", "Requests answered.", ("route", "model", "status"))
        self.in_flight = self.gauge("gateway_requests_in_flight", "Requests being answered.")
        self.first_byte_seconds = self.histogram(
            "gateway_time_to_first_byte_seconds", "Arrival to the first byte of the answer's body.", SECONDS, ("route",)
        )
        self.seconds = self.histogram(
            "gateway_request_seconds", "Arrival to the end of the answer.", SECONDS, ("route",)
        )
        self.response_bytes = self.counter("gateway_response_bytes", "Bytes of answer bodies.", ("route",))
        self.client_departures = self.counter(
            "gateway_client_departures", "Clients that left before their answer ended."
        )
        self.engine_failures = self.counter("gateway_engine_failures", "Calls of the engine that failed.", ("reason",))
        self.unexpected_errors = self.counter(
            "gateway_unexpected_errors", "Errors that no code expected; see the logs."
        )
        self.fetch_seconds = self.histogram(
            "gateway_fetch_seconds", "Time to bring a version to the disk tier.", SECONDS
        )
        self.fetch_failures = self.counter(
            "gateway_fetch_failures", "Versions that could not be brought to the disk tier."
        )
        self._exchange_series: dict[tuple[str, str, int], ExchangeSeries] = {}

    def exchange(self, route: str, model_kind: str, status: int) -> ExchangeSeries:
        """All three are our own words, so there are few."""
        series = self._exchange_series.get((route, model_kind, status))
        if series is None:
            series = self._exchange_series[route, model_kind, status] = ExchangeSeries(
                self.requests.labels(route, model_kind, str(status)),
                self.seconds.labels(route),
                self.first_byte_seconds.labels(route),
                self.response_bytes.labels(route),
            )
        return series
