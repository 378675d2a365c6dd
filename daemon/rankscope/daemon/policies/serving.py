"""PolicyService over gRPC."""

from __future__ import annotations

import grpc

from rankscope.daemon.policies.holding import BadPolicyError, PolicyBoard
from rankscope.daemon.serving import Service
from rankscope.v1 import policy_service_pb2 as pb
from rankscope.v1 import policy_service_pb2_grpc


class PolicyServicer(policy_service_pb2_grpc.PolicyServiceServicer):
    def __init__(self, board: PolicyBoard) -> None:
        self._board = board

    def ApplyPolicies(
        self, request: pb.ApplyPoliciesRequest, context: grpc.ServicerContext
    ) -> pb.ApplyPoliciesResponse:
        try:
            return pb.ApplyPoliciesResponse(notes=self._board.apply(request))
        except BadPolicyError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort returns never") from error

    def ListPolicies(self, request: pb.ListPoliciesRequest, context: grpc.ServicerContext) -> pb.ListPoliciesResponse:
        return pb.ListPoliciesResponse(policies=self._board.held())


def policy_service(board: PolicyBoard) -> Service:
    name = pb.DESCRIPTOR.services_by_name["PolicyService"].full_name
    servicer = PolicyServicer(board)
    return Service(name, lambda to: policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(servicer, to))
