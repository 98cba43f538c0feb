"""The extra `encryption`: a driver has a certificate."""

from __future__ import annotations

from penstock.spark.driver_certificate import driver_tls, task_context

task_context(driver_tls().certificate)
